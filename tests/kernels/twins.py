"""What every set of kernels computes: tests that `test_cpu.py` and its neighbours take in.

Rules on numbers that are exact are compared with the oracle, others with the reference in float64,
which its own tests compare with the oracle. Each module says by its fixture `backend` what it runs.
"""

import inspect
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from hypothesis import strategies as st

from tests import oracle
from tests.kernels.backend import EPS, HALVES, Backend, drawn
from tests.kernels.critical_inputs import check_criticality, check_extremes
from tests.kernels.probe_inputs import ROTATIONS, check_probed, probe_inputs
from tests.method_cases import MethodCase
from tests.strategies import (
    Shape,
    head_sizes,
    kv_heads,
    random_layer,
    scoring_inputs,
    seeds,
    shapes,
)
from tests.test_page_table import Batch, batches, orders_of, sharings
from tests.uneven import some_absent
from vllm_kvselect.choice import retain
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.paging import compaction, page_table
from vllm_kvselect.paging.order import Sharing
from vllm_kvselect.paging.page_table import PageTable
from vllm_kvselect.scoring import defensivekv, probe, snapkv, value_norms
from vllm_kvselect.scoring.inputs import Scorer, absent_columns
from vllm_kvselect.scoring.value_norms import OutputProjection
from vllm_kvselect.selecting import selection

WINDOW_SCORERS = (
    snapkv.snapkv_scores,
    snapkv.snapkv_scores,
    defensivekv.mean_attention,
    defensivekv.defensive_scores,
)


def test_twins_have_the_names_and_signatures_of_their_references(backend: Backend) -> None:
    replaced = 0
    for part in fields(Kernels):
        if part.name == "over_rows":
            continue
        reference, twin = getattr(REFERENCES, part.name), getattr(backend.kernels, part.name)
        assert reference.__name__ == part.name
        if isinstance(twin, partial):  # the reference, made of twins of its parts
            assert twin.func is reference
            assert twin.keywords
            for name, of_part in twin.keywords.items():
                default = inspect.signature(reference).parameters[name].default
                assert of_part is not default
                assert of_part.__name__.removeprefix("_") == default.__name__ == name
                assert inspect.signature(of_part) == inspect.signature(default)
            replaced += 1
            continue
        assert twin.__name__ == part.name
        assert inspect.signature(twin) == inspect.signature(reference)
        replaced += twin is not reference and twin is getattr(backend.module, part.name)
    assert replaced >= backend.least_replaced


@drawn(
    shape=shapes(max_tokens=300),
    seed=seeds,
    scorer=st.sampled_from(WINDOW_SCORERS),
    kernel_size=st.sampled_from((1, 3, 7, 63)),
    pooling=st.sampled_from(("max", "max", "mean")),
    reduction=st.sampled_from(("mean", "mean", "max")),
    far=st.booleans(),
    with_sinks=st.booleans(),
    is_uneven=st.booleans(),
)
def test_scores_of_the_window(
    backend: Backend,
    shape: Shape,
    seed: int,
    dtype: torch.dtype,
    scorer: Scorer,
    kernel_size: int,
    pooling: str,
    reduction: str,
    far: bool,
    with_sinks: bool,
    is_uneven: bool,
) -> None:
    layer = random_layer(shape, seed, dtype, with_sinks=with_sinks)
    if far:  # one key takes all attention: the others' weights vanish without being lost
        layer.key[:, 3] *= 20
    # Every other channel block of wider rows, as in the output of a fused projection.
    wide = layer.key.transpose(0, 1).repeat(1, 2, 1).to(backend.device)
    key, query = wide[:, : shape.num_kv_heads].transpose(0, 1), layer.query.to(backend.device)
    options = {"pooling": pooling, "group_reduction": reduction}
    config = EvictionConfig.parse(
        {
            "method": "snapkv",
            "window": shape.window,
            "kernel_size": kernel_size,
            **(options if scorer is snapkv.snapkv_scores else {}),
        }
    )
    sinks = None if layer.sinks is None else layer.sinks.to(backend.device)
    exact = None if sinks is None else sinks.double()
    inputs = scoring_inputs(query.double(), key.double(), shape.scale, sinks=exact)
    given_inputs = scoring_inputs(query, key, shape.scale, sinks=sinks)
    if is_uneven:
        absent = some_absent(shape, seed).to(backend.device)
        inputs, given_inputs = (replace(i, num_absent=absent) for i in (inputs, given_inputs))
    expected = scorer(inputs, config)
    scores = backend.scores(scorer, given_inputs, config)
    assert scores.dtype == torch.float32
    if is_uneven:  # what is said of absent entries is ignored
        is_absent = absent_columns(absent, scores.shape[1])
        scores, expected = (each.masked_fill(is_absent, 0) for each in (scores, expected))
    # A logit of n products is off by n eps of the sum of magnitudes; a weight by twice that.
    group = query.view(shape.window, shape.num_kv_heads, shape.group, -1).double().abs()
    magnitude = torch.einsum("wkgd,ktd->kgwt", group, key.double().abs()).max() * shape.scale
    largest = float(magnitude) + (0 if sinks is None else float(sinks.abs().max()))
    bound = 2 * (shape.head_size + 4) * EPS * largest + (key.shape[1] + 8) * EPS
    torch.testing.assert_close(scores.double(), expected, rtol=bound, atol=2.0**-120)


@pytest.mark.parametrize("window", [1, 70])
def test_windows_of_one_query_and_of_more_than_a_tile(backend: Backend, window: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(window, 2, 16, generator=generator).to(backend.device)
    key = torch.randn(1, 200, 16, generator=generator).to(backend.device)
    config = EvictionConfig(method="adakv-perturb", window=window, kernel_size=1)
    expected = snapkv.snapkv_scores(scoring_inputs(query.double(), key.double(), 0.25), config)
    scores = backend.scores(snapkv.snapkv_scores, scoring_inputs(query, key, 0.25), config)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=0)


@drawn(shape=shapes(max_tokens=100), seed=seeds, kind=ROTATIONS, first_position=st.integers(0, 600))
def test_probed_scores(
    backend: Backend, shape: Shape, seed: int, dtype: torch.dtype, kind: str, first_position: int
) -> None:
    inputs = probe_inputs(shape, seed, dtype, kind, backend.device)
    # The last one is the window.
    competing = replace(inputs, value=inputs.value[:, :-1], first_position=first_position)
    config = EvictionConfig(method="adakv-perturb", window=1)
    scores = backend.scores(probe.probe_scores, competing, config)
    check_probed(scores, replace(competing, key=inputs.key[:, :-1]), first_position)


@drawn(
    seed=seeds,
    heads=kv_heads,
    group=st.integers(1, 3),
    size=head_sizes,
    hidden_size=st.sampled_from((1, 16, 40, 72, 130)),
    num_tokens=st.integers(1, 140),
)
def test_value_norms(
    backend: Backend,
    seed: int,
    heads: int,
    group: int,
    size: int,
    hidden_size: int,
    num_tokens: int,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(num_tokens, heads, size, generator=generator).to(dtype).transpose(0, 1)
    weight = torch.randn(heads, size, group, hidden_size, generator=generator).to(dtype)
    value, weight = value.to(backend.device), weight.to(backend.device)
    projection = backend.pack(OutputProjection.of(weight))
    norms = backend.value_norms(value, projection)
    expected = value_norms.value_norms(value.double(), weight.double())
    # A product is off by `size` eps of its magnitudes, and a sum by as many as it has terms.
    magnitude = value_norms.value_norms(value.double().abs(), weight.double().abs())
    bound = (size + group * hidden_size) * EPS * magnitude
    assert ((norms - expected).abs() <= bound).all()


@drawn(
    seed=seeds,
    heads=kv_heads,
    size=st.sampled_from((8, 24, 80)),
    num_tokens=st.integers(1, 200),
    alpha=st.sampled_from((0.0, 0.25, 0.5, 1.0)),
    eps=st.sampled_from((0.0, 1e-4, 1.0)),
    tied=st.booleans(),
    data=st.data(),
)
def test_needed_value_norms_retain_what_all_norms_retain(
    backend: Backend,
    seed: int,
    heads: int,
    size: int,
    num_tokens: int,
    dtype: torch.dtype,
    alpha: float,
    eps: float,
    tied: bool,
    data: st.DataObject,
) -> None:
    """All norms are the kernels' own."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(heads, num_tokens, size, generator=generator).to(dtype).to(backend.device)
    strength = torch.rand(heads, size, 1, 1, generator=generator) ** 6
    weight = (torch.randn(heads, size, 2, 40, generator=generator) * strength).to(dtype)
    projection = backend.pack(OutputProjection.of(weight.to(backend.device)))
    scores, weights = (
        backend.ranked(each, heads, num_tokens, tied).abs().nan_to_num(posinf=1.0)
        for each in (seed, data.draw(seeds))
    )
    budgets = backend.budgets(data.draw, heads, num_tokens)
    total = int(budgets.sum())
    arguments = (scores, weights, value, projection, budgets)
    of_stage_1 = selection.stage_1_counts(budgets, alpha)
    norms = backend.needed_norms(*arguments, of_stage_1, eps)
    every = backend.value_norms(value, projection)
    rtol = backend.norms_rtol
    torch.testing.assert_close(norms[norms != 0], every[norms != 0], rtol=rtol, atol=0)
    stage_1 = selection.best_mask(scores, of_stage_1)
    own, pruned, exact = (
        selection.select(selection.stage_2_keys(weights, each, stage_1, eps), budgets, total)
        for each in (norms, every.where(norms != 0, 0.0), every)
    )
    assert torch.equal(pruned, exact)
    retained = backend.select_pruned(*arguments, total, of_stage_1, eps)
    assert torch.equal(retained, own)


def test_most_norms_are_not_needed(backend: Backend) -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(2, 500, 64, generator=generator).to(backend.device)
    weight = torch.randn(2, 64, 2, 80, generator=generator).to(backend.device)
    projection = backend.pack(OutputProjection.of(weight))
    scores = (torch.rand(2, 500, generator=generator) ** 8).to(backend.device)
    budgets = torch.tensor([40, 20]).to(backend.device)
    norms = backend.needed_norms(scores, scores, value, projection, budgets, budgets // 2, 1e-4)
    assert ((norms != 0).sum(dim=1) < 3 * budgets).all()


def entries(flat: torch.Tensor, num_tokens: int) -> list[tuple[int, int]]:
    """Flat indices as `(head, token)`."""
    assert flat.dtype == torch.int64
    return [divmod(index, num_tokens) for index in flat.tolist()]


@drawn(
    seed=seeds, heads=kv_heads, num_tokens=st.integers(1, 150), tied=st.booleans(), data=st.data()
)
def test_selection(
    backend: Backend, seed: int, heads: int, num_tokens: int, tied: bool, data: st.DataObject
) -> None:
    scores = backend.ranked(seed, heads, num_tokens, tied)
    budgets = backend.budgets(data.draw, heads, num_tokens)
    retained = backend.kernels.select(scores, budgets, int(budgets.sum()))
    assert entries(retained, num_tokens) == oracle.select(scores.tolist(), budgets.tolist())
    mask = backend.kernels.best_mask(scores, budgets)
    taken = entries(mask.flatten().nonzero().flatten(), num_tokens)
    assert taken == oracle.select(scores.tolist(), budgets.tolist())


@pytest.mark.parametrize(
    "values", [(0.0, -0.0), (torch.nan, torch.inf), (1e-45, 0.0), (-1.0, -2.0)]
)
def test_the_order_of_scores_is_that_of_a_stable_sort(
    backend: Backend, values: tuple[float, float]
) -> None:
    rows = [values * 3 + values[:1], values[::-1] * 3 + values[1:]]
    scores = torch.tensor(rows).to(backend.device)
    for count in range(8):
        budgets = torch.tensor([count, 7 - count]).to(backend.device)
        expected = selection.select(scores, budgets, 7)
        assert torch.equal(backend.kernels.select(scores, budgets, 7), expected)


@drawn(
    seed=seeds,
    heads=st.integers(1, 9),
    block_size=st.sampled_from((1, 4, 16)),
    num_packed=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    more=st.integers(0, 20),
    tied=st.booleans(),
    safeguard=st.sampled_from((0.0, 0.2, 0.37, 1.0)),
    floor=st.sampled_from(("blend", "minimum")),
)
def test_allocation(
    backend: Backend,
    seed: int,
    heads: int,
    block_size: int,
    num_packed: list[int],
    more: int,
    tied: bool,
    safeguard: float,
    floor: str,
) -> None:
    """In segments side by side, each with packed blocks of its own."""
    num_tokens = max(num_packed) * block_size + more
    scores = backend.ranked(seed, len(num_packed) * heads, num_tokens, tied)
    scores = scores.unflatten(0, (len(num_packed), heads))
    config = EvictionConfig.parse(
        {"method": "adakv-perturb", "safeguard": safeguard, "floor": floor}
    )
    pages = backend.kernels.adaptive_pages(scores, num_packed, block_size, config)
    assert pages.tolist() == [
        oracle.adaptive_pages(segment.tolist(), each, block_size, safeguard, floor)
        for segment, each in zip(scores, num_packed, strict=True)
    ]
    pages = backend.kernels.shared_pages(scores, num_packed, block_size, config)
    assert pages.tolist() == [
        oracle.adaptive_pages(segment.tolist(), each, block_size, 0.0)
        for segment, each in zip(scores, num_packed, strict=True)
    ]
    pages = backend.kernels.uniform_pages(scores, num_packed, block_size, config)
    assert pages.tolist() == [[each] * heads for each in num_packed]
    expected = selection.best_first(scores, num_packed)
    assert torch.equal(backend.kernels.best_first(scores, num_packed), expected)


@pytest.mark.parametrize("num_values", [1, 3, 10**6])
def test_pages_of_256_heads_are_the_references(backend: Backend, num_values: int) -> None:
    """Of few values nearly all are ties, among tokens and among heads."""
    generator = torch.Generator().manual_seed(num_values)
    scores = torch.randint(num_values, (1, 256, 20), generator=generator).float()
    given = (scores.to(backend.device), [1], 8, EvictionConfig(method="adakv-perturb"))
    expected = REFERENCES.adaptive_pages(*given)
    assert torch.equal(backend.kernels.adaptive_pages(*given), expected)
    assert int(expected.sum()) == 256


def test_what_is_absent_is_not_among_the_best(backend: Backend) -> None:
    scores = torch.full((2, 1, 8), -torch.inf)
    scores[:, :, 5:] = torch.tensor([2.0, 1.0, 3.0])
    found = backend.kernels.best_first(scores.to(backend.device), [2, 4])
    assert found[:, 0, 5:].tolist() == [[torch.inf, 1.0, torch.inf], [torch.inf] * 3]
    assert (found[:, :, :5] == -torch.inf).all()


def test_the_lower_head_gets_a_page_that_two_heads_share(backend: Backend) -> None:
    """Two heads have six of the twelve best entries each, a page and a half."""
    scores = torch.zeros(1, 3, 8)
    scores[0, 1:, :6] = 1.0
    pages = backend.kernels.shared_pages(
        scores.to(backend.device), [1], 4, EvictionConfig(method="adakv-perturb")
    )
    assert pages.tolist() == [[0, 2, 1]]


@drawn(
    batch=batches(),
    more=st.integers(0, 3),
    integers=st.sampled_from((torch.int32, torch.int64)),
    first_layer=st.integers(0, 2),
)
def test_page_tables_fill_the_buffers_that_the_reference_fills(
    backend: Backend, batch: Batch, more: int, integers: torch.dtype, first_layer: int
) -> None:
    *tensors, offsets, block_size, num_blocks, _ = batch.inputs(integers)
    inputs = [part.to(backend.device) for part in tensors]
    # A layer's offsets as they lie in the state, requests in front.
    inputs.append(offsets.to(backend.device).transpose(0, 1).contiguous().transpose(0, 1))
    filled = []
    for build in (backend.kernels.headwise_page_table, page_table.headwise_page_table):
        buffers = PageTable(*(part.to(backend.device) for part in batch.buffers(more)))
        out = PageTable(*(part[:, :-1] for part in buffers))
        assert build(*inputs, block_size, num_blocks, first_layer, out) is out
        filled.append(buffers)
    assert torch.equal(filled[0].pages, filled[1].pages)
    assert torch.equal(filled[0].seq_lens, filled[1].seq_lens)


@drawn(batch=batches(), more=st.integers(0, 70), sharing=st.none() | sharings)
def test_orders_schedules_and_page_tables_in_them_are_the_references(
    backend: Backend, batch: Batch, more: int, sharing: Sharing | None
) -> None:
    *tensors, block_size, num_blocks, _ = batch.inputs()
    inputs = [part.to(backend.device) for part in tensors]
    filled = []
    for kernels in (backend.kernels, REFERENCES):
        orders = orders_of(batch, backend.device, more, sharing)
        kernels.longest_first(inputs[1], inputs[3], inputs[4], block_size, orders)
        buffers = PageTable(*(part.to(backend.device) for part in batch.buffers(1)))
        out = PageTable(*(part[:, :-1] for part in buffers))
        sizes = block_size, num_blocks, 0
        kernels.headwise_page_table(*inputs, *sizes, out, orders.sequences[:, :-1])
        numbers = [] if orders.schedules is None else [orders.schedules.numbers]
        filled.append((orders.sequences, orders.seq_lens, *numbers, *buffers))
    assert all(torch.equal(*pair) for pair in zip(*filled, strict=True))
    assert (filled[0][0][:, -1] == -7).all()


def drawn_bits(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bit pattern, NaN among them."""
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(256, size, dtype=torch.uint8, generator=generator).view(dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float8_e4m3fn])
@pytest.mark.parametrize("most_bytes", [2**28, 60 * 24, 1])
def test_entries_are_moved_as_bytes(
    backend: Backend, dtype: torch.dtype, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two requests in two layers; blocks that are packed are read from, in parts or at once."""
    monkeypatch.setattr(compaction, "MOST_BYTES", most_bytes)
    generator = torch.Generator().manual_seed(0)
    num_layers, num_blocks, num_heads, size, num_competing = 2, 8, 3, 4, 12
    shape = (num_layers * num_blocks, num_heads, size, 24)
    memory = drawn_bits(generator, dtype, *shape).to(backend.device)
    held = [[5, 1, 3], [2, 7, 6]]  # of which each packs the last two
    starts = [num_blocks * layer for layer in range(num_layers)]
    rows = [torch.tensor(blocks) + start for blocks in held for start in starts]
    pages = torch.cat([compaction.head_pages(row, num_heads) for row in rows])
    packed_blocks = torch.cat([row[1:] for row in rows])
    most = len(pages) * num_competing
    retained = torch.randperm(most, generator=generator)[: len(packed_blocks) * num_heads * size]
    retained = retained.sort().values
    expected = as_bytes(memory).clone()
    for place, index in enumerate(retained.tolist()):
        head, column = divmod(index, num_competing)
        block, slot = divmod(int(pages[head, column // size]), num_heads)
        packed, to = divmod(place, num_heads * size)
        target = (int(packed_blocks[packed]), *divmod(to, size))
        expected[target] = as_bytes(memory)[block, slot, column % size]
    given = [part.to(backend.device) for part in (pages, retained, packed_blocks)]
    backend.kernels.move_retained(memory, given[0], given[1], num_competing, given[2])
    assert torch.equal(as_bytes(memory), expected)


def test_what_is_moved_at_once_is_bounded() -> None:
    """Of a prompt of 131,072 tokens of an 8B at an eighth: 2 GiB in bfloat16."""
    num_entries, width, itemsize = 32 * 8 * 2**14, 256, 2
    found = compaction.parts(width, itemsize, num_entries)
    assert [part.start for part in found] == [*range(0, width, 32)]
    assert [part.stop for part in found] == [*range(32, width + 1, 32)]
    assert num_entries * 32 * itemsize == compaction.MOST_BYTES
    assert compaction.parts(width, itemsize, 2**17) == [slice(0, width)]


@pytest.mark.parametrize("dtype", [torch.uint8, *HALVES, torch.float64])
def test_pages_with_an_inner_order_are_read_and_written_as_they_are(
    backend: Backend, dtype: torch.dtype
) -> None:
    cache = (100 * torch.rand(50, 2 * 96)).to(dtype).to(backend.device)[:, :128]
    pages = torch.randperm(50)[:23].to(backend.device)
    places = torch.randperm(128)[:96].to(torch.int32).to(backend.device)
    kernels = backend.kernels
    expected = compaction.read_pages(cache, pages, places)
    assert torch.equal(kernels.read_pages(cache, pages, places), expected)
    slots, block_size = torch.randperm(50 * 8)[:77].to(backend.device), 8
    expected = compaction.read_entries(cache, slots, places, block_size)
    assert torch.equal(kernels.read_entries(cache, slots, places, block_size), expected)
    page, offset = 49, 3  # an entry of which all is known
    (entry,) = kernels.read_entries(
        cache, torch.tensor([page * 8 + offset]).to(backend.device), places, block_size
    )
    assert torch.equal(entry, cache[page, places[offset * 12 : (offset + 1) * 12].long()])
    targets, other = torch.randperm(50 * 8)[:77].to(backend.device), cache.clone()
    kernels.write_entries(cache, targets, places, block_size, expected)
    compaction.write_entries(other, targets, places, block_size, expected)
    assert torch.equal(cache, other)
    assert torch.equal(kernels.read_entries(cache, targets, places, block_size), expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_bytes_are_read_as_the_numbers_that_they_stand_for(
    backend: Backend, dtype: torch.dtype
) -> None:
    numbers = torch.randn(256).to(dtype).to(backend.device)
    codes = torch.randint(256, (3, 41, 5), dtype=torch.uint8).to(backend.device)
    expected = torch.stack([numbers[code] for code in codes.flatten().tolist()]).view(codes.shape)
    assert torch.equal(compaction.look_up(codes, numbers), expected)
    assert torch.equal(backend.kernels.look_up(codes, numbers), expected)


@pytest.mark.parametrize("num_bad", [1, 5])
def test_a_broken_model_does_not_break_the_bookkeeping(backend: Backend, num_bad: int) -> None:
    shape = Shape(3, 2, 8, 8, 3, 51, 2)
    for case in backend.cases:
        for dtype in backend.dtypes:
            layer = random_layer(shape, 0, dtype)
            layer.key[1, 7 : 7 + num_bad] = layer.value[2, 3 : 3 + num_bad] = torch.nan
            inputs = backend.ready(case.inputs(shape, backend.placed(layer)))
            config = case.config(window=shape.window)
            retention = retain([inputs], 2, 8, config, kernels=backend.kernels)
            assert int(retention.offsets[-1]) == 6, case
            assert len(set(retention.retained.tolist())) == 48, case
            assert int(retention.retained.min()) >= 0, case
            assert int(retention.retained.max()) < 3 * shape.num_tokens, case


@pytest.mark.parametrize("method", ["adakv-perturb", "defensivekv", "thetakv"])
def test_float64_goes_to_the_reference(backend: Backend, method: str) -> None:
    shape = Shape(2, 2, 8, 8, 3, 51, 2)
    case = MethodCase(method)
    inputs = case.inputs(shape, backend.placed(random_layer(shape, 1)))
    config = case.config(window=3)
    expected = retain([inputs], 2, 8, config)
    retention = retain([backend.ready(inputs)], 2, 8, config, kernels=backend.kernels)
    assert torch.equal(retention.retained, expected.retained)


@drawn(shape=shapes(max_tokens=300), seed=seeds, size=st.sampled_from((1, 4, 16, 17)))
def test_extremes(backend: Backend, shape: Shape, seed: int, dtype: torch.dtype, size: int) -> None:
    check_extremes(backend.kernels, shape, seed, dtype, size, backend.device)


@drawn(shape=shapes(max_tokens=100), seed=seeds, num_segments=st.integers(1, 5))
def test_criticality(
    backend: Backend, shape: Shape, seed: int, dtype: torch.dtype, num_segments: int
) -> None:
    check_criticality(backend.kernels, shape, seed, dtype, num_segments, backend.device)


__all__ = [name for name in globals() if name.startswith("test_")]
