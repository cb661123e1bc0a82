"""The kernels in Triton compute what their references compute: in its interpreter, or on a GPU."""

import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.critical_inputs import check_criticality, check_extremes
from tests.kernels.probe_inputs import ROTATIONS, check_imitated, probe_inputs
from tests.kernels.unsynchronised import SYNCHRONISING, SynchronisationError, unsynchronised
from tests.method_cases import METHOD_CASES, MethodCase
from tests.strategies import (
    Shape,
    head_sizes,
    kv_heads,
    random_layer,
    scoring_inputs,
    seeds,
    shapes,
)
from tests.test_page_table import Batch, batches
from tests.uneven import ROUND_CASES, some_absent
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.methods.choice import retain
from vllm_kvselect.methods.registry import METHODS
from vllm_kvselect.paging import compaction, page_table
from vllm_kvselect.paging.page_table import PageTable
from vllm_kvselect.scoring import snapkv, value_norms
from vllm_kvselect.scoring.value_norms import OutputProjection
from vllm_kvselect.selecting import allocation, selection

pytest.importorskip("triton")
from vllm_kvselect.kernels import cuda
from vllm_kvselect.kernels import triton as triton_kernels
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.kernels.triton import allocation as allocation_kernels
from vllm_kvselect.kernels.triton import criticality as criticality_kernels
from vllm_kvselect.kernels.triton import page_table as page_table_kernels
from vllm_kvselect.kernels.triton import selection as selection_kernels
from vllm_kvselect.kernels.triton import value_norms as norm_kernels
from vllm_kvselect.kernels.triton import window_attention as attention_kernels
from vllm_kvselect.kernels.triton.pruning import needed_value_norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [
    importlib.import_module(module.name)
    for module in pkgutil.iter_modules(triton_kernels.__path__, f"{triton_kernels.__name__}.")
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = torch.finfo(torch.float32).eps

brief = settings(max_examples=8, deadline=None, derandomize=True)
"""The interpreter takes 10 to 30 ms for each program of a grid."""


@pytest.fixture(scope="module", autouse=True)
def small_tiles() -> Iterator[None]:
    """Tiles so small that inputs of tests span several; on a GPU they are as they are served."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(selection_kernels, "_LARGEST_BLOCK", 64)
            patch.setattr(allocation_kernels, "_BLOCK", 32)
            patch.setattr(allocation_kernels, "_CELLS", 16)
            patch.setattr(attention_kernels, "_LEAST_SPLIT", 64)
            patch.setattr(norm_kernels, "_PART", 64)
            patch.setattr(page_table_kernels, "_BLOCK", 4)
            patch.setattr(criticality_kernels, "_BLOCKS", 16)
            patch.setattr(criticality_kernels, "_TOKENS", 8)
        yield


def ranked(seed: int, heads: int, num_tokens: int, tied: bool) -> torch.Tensor:
    """Scores, rows apart from each other as in a slice, with an infinity as selection has them."""
    scores = torch.rand(heads, num_tokens + 3, generator=torch.Generator().manual_seed(seed))
    if tied:
        scores = (scores * 4).round() / 4 - 0.5
    scores[0, 0] = torch.inf
    return scores.to(DEVICE)[:, :num_tokens]


def drawn_budgets(data: st.DataObject, heads: int, num_tokens: int) -> torch.Tensor:
    each = st.lists(st.integers(0, num_tokens), min_size=heads, max_size=heads)
    return torch.tensor(data.draw(each)).to(DEVICE)


def test_twins_have_the_names_and_signatures_of_their_references() -> None:
    replaced = 0
    for part in fields(Kernels):
        reference, twin = getattr(REFERENCES, part.name), getattr(cuda.KERNELS, part.name)
        assert twin.__name__ == reference.__name__ == part.name
        assert inspect.signature(twin) == inspect.signature(reference)
        replaced += twin is not reference and twin is getattr(cuda, part.name)
    assert replaced >= 8


def test_every_kernel_compiles_for_an_h100_and_fits_its_shared_memory() -> None:
    command = [sys.executable, "-m", "tests.kernels.compiled"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    shared = json.loads(result.stdout.splitlines()[-1])
    assert max(shared.values()) <= 227 * 1024, shared
    assert set(shared) == {
        f"{module.__name__.split('.')[-1]}.{name}"
        for module in KERNELS
        for name in vars(module)
        if name.endswith("_kernel")
    }


@brief
@given(
    shape=shapes(max_tokens=300),
    seed=seeds,
    dtype=st.sampled_from(DTYPES),
    far=st.booleans(),
    pooling=st.sampled_from(("max", "mean")),
    reduction=st.sampled_from(("mean", "max")),
    with_sinks=st.booleans(),
    is_uneven=st.booleans(),
)
def test_snapkv_scores(
    shape: Shape,
    seed: int,
    dtype: torch.dtype,
    far: bool,
    pooling: str,
    reduction: str,
    with_sinks: bool,
    is_uneven: bool,
) -> None:
    layer = random_layer(shape, seed, dtype, with_sinks=with_sinks)
    if far:  # one key takes all attention: the others' weights vanish without being lost
        layer.key[:, 3] *= 20
    # Every other channel block of wider rows, as in the output of a fused projection.
    wide = layer.key.transpose(0, 1).repeat(1, 2, 1).to(DEVICE)
    key, query = wide[:, : shape.num_kv_heads].transpose(0, 1), layer.query.to(DEVICE)
    config = EvictionConfig.parse(
        {"window": shape.window, "pooling": pooling, "group_reduction": reduction}
    )
    sinks = None if layer.sinks is None else layer.sinks.to(DEVICE)
    exact = None if sinks is None else sinks.double()
    inputs = scoring_inputs(query.double(), key.double(), shape.scale, sinks=exact)
    given_inputs = scoring_inputs(query, key, shape.scale, sinks=sinks)
    if is_uneven:
        absent = some_absent(shape, seed).to(DEVICE)
        inputs, given_inputs = (replace(i, num_absent=absent) for i in (inputs, given_inputs))
    expected = snapkv.snapkv_scores(inputs, config)
    scores = cuda.snapkv_scores(given_inputs, config)
    assert scores.dtype == torch.float32
    # A logit of n products is off by n eps of the sum of magnitudes; a weight by twice that.
    group = query.view(shape.window, shape.num_kv_heads, shape.group, -1).double().abs()
    magnitude = torch.einsum("wkgd,ktd->kgwt", group, key.double().abs()).max() * shape.scale
    largest = float(magnitude) + (0 if sinks is None else float(sinks.abs().max()))
    bound = 2 * (shape.head_size + 4) * EPS * largest + (key.shape[1] + 8) * EPS
    torch.testing.assert_close(scores.double(), expected, rtol=bound, atol=2.0**-120)
    unpooled = EvictionConfig(window=shape.window, kernel_size=1)
    scores = cuda.mean_attention(given_inputs, unpooled)
    expected = snapkv.snapkv_scores(inputs, unpooled)
    torch.testing.assert_close(scores.double(), expected, rtol=bound, atol=2.0**-120)


@brief
@given(
    shape=shapes(max_tokens=100),
    seed=seeds,
    dtype=st.sampled_from(DTYPES),
    kind=ROTATIONS,
    first_position=st.integers(0, 600),
)
def test_imitated_scores(
    shape: Shape, seed: int, dtype: torch.dtype, kind: str, first_position: int
) -> None:
    inputs = probe_inputs(shape, seed, dtype, kind)
    check_imitated(cuda.imitated_scores(inputs, first_position), inputs, first_position)


@pytest.mark.parametrize("window", [1, 70])
def test_windows_of_one_query_and_of_more_than_a_tile(window: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(window, 2, 16, generator=generator).to(DEVICE)
    key = torch.randn(1, 200, 16, generator=generator).to(DEVICE)
    config = EvictionConfig(window=window, kernel_size=1)
    expected = snapkv.snapkv_scores(scoring_inputs(query.double(), key.double(), 0.25), config)
    scores = cuda.snapkv_scores(scoring_inputs(query, key, 0.25), config)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=0)
    assert cuda.snapkv_scores(scoring_inputs(query, key[:, :window], 0.25), config).shape == (1, 0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_keys_of_an_fp8_cache_are_scored_as_the_numbers_that_they_stand_for(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, 16, generator=generator).bfloat16().to(DEVICE)
    key = torch.randn(2, 60, 16, generator=generator).to(dtype).to(DEVICE)
    config = EvictionConfig(window=3)
    expected = snapkv.snapkv_scores(scoring_inputs(query.double(), key.double(), 0.25), config)
    scores = cuda.snapkv_scores(scoring_inputs(query, key, 0.25), config)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=0)


@brief
@given(
    seed=seeds,
    heads=kv_heads,
    group=st.integers(1, 3),
    size=head_sizes,
    hidden_size=st.sampled_from((1, 16, 40, 72, 130)),
    num_tokens=st.integers(1, 140),
    dtype=st.sampled_from(DTYPES),
)
def test_value_norms(
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
    value, weight = value.to(DEVICE), weight.to(DEVICE)
    norms = cuda.projected_value_norms(value, OutputProjection.of(weight))
    expected = value_norms.value_norms(value.double(), weight.double())
    # A product is off by `size` eps of its magnitudes, and a sum by as many as it has terms.
    magnitude = value_norms.value_norms(value.double().abs(), weight.double().abs())
    bound = (size + group * hidden_size) * EPS * magnitude
    assert ((norms - expected).abs() <= bound).all()


@brief
@given(
    seed=seeds,
    heads=kv_heads,
    size=st.sampled_from((8, 24, 80)),
    num_tokens=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    alpha=st.sampled_from((0.0, 0.25, 0.5, 1.0)),
    eps=st.sampled_from((0.0, 1e-4, 1.0)),
    tied=st.booleans(),
    data=st.data(),
)
def test_needed_value_norms_retain_what_all_norms_retain(
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
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(heads, num_tokens, size, generator=generator).to(dtype).to(DEVICE)
    strength = torch.rand(heads, size, 1, 1, generator=generator) ** 6
    weight = (torch.randn(heads, size, 2, 40, generator=generator) * strength).to(dtype)
    projection = OutputProjection.of(weight.to(DEVICE))
    scores = ranked(seed, heads, num_tokens, tied).abs().nan_to_num(posinf=1.0)
    budgets = drawn_budgets(data, heads, num_tokens)
    stage_1 = selection.stage_1_mask(scores, budgets, alpha)
    norms = needed_value_norms(scores, value, projection, stage_1, budgets, eps)
    every = cuda.projected_value_norms(value, projection)
    # Tiles of other rows may be summed in another order.
    torch.testing.assert_close(norms[norms != 0], every[norms != 0], rtol=256 * EPS, atol=0)
    total = int(budgets.sum())
    pruned, exact = (
        selection.select(selection.stage_2_keys(scores, each, stage_1, eps), budgets, total)
        for each in (every.where(norms != 0, 0.0), every)
    )
    assert torch.equal(pruned, exact)


def test_norms_whose_bounds_come_second_are_found() -> None:
    """Bounds are loose for values that reach one hidden channel, tight where they reach all."""
    hidden_size = 64
    weight = torch.zeros(1, 2, 1, hidden_size, device=DEVICE)
    weight[0, 0, 0, 0], weight[0, 1] = hidden_size**0.5, 1.0
    value = torch.zeros(1, 80, 2, device=DEVICE)
    value[0, :40, 0], value[0, 40:60, 1], value[0, 60:, 1] = 1.1, 1.0, 0.1
    scores, budgets = torch.ones(1, 80, device=DEVICE), torch.tensor([10], device=DEVICE)
    stage_1 = selection.stage_1_mask(scores, budgets, 0.0)
    projection = OutputProjection.of(weight)
    norms = needed_value_norms(scores, value, projection, stage_1, budgets, 0.0)
    assert norms.count_nonzero() == 60
    retained = cuda.select(selection.stage_2_keys(scores, norms, stage_1, 0.0), budgets, 10)
    assert retained.tolist() == list(range(40, 50))


def test_most_norms_are_not_needed() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(2, 500, 64, generator=generator).to(DEVICE)
    weight = torch.randn(2, 64, 2, 80, generator=generator).to(DEVICE)
    scores = (torch.rand(2, 500, generator=generator) ** 8).to(DEVICE)
    budgets = torch.tensor([40, 20]).to(DEVICE)
    stage_1 = selection.stage_1_mask(scores, budgets, 0.5)
    projection = OutputProjection.of(weight)
    norms = needed_value_norms(scores, value, projection, stage_1, budgets, 1e-4)
    assert ((norms != 0).sum(dim=1) < 3 * budgets).all()


@brief
@given(
    seed=seeds, heads=kv_heads, num_tokens=st.integers(1, 150), tied=st.booleans(), data=st.data()
)
def test_selection(seed: int, heads: int, num_tokens: int, tied: bool, data: st.DataObject) -> None:
    scores = ranked(seed, heads, num_tokens, tied)
    budgets = drawn_budgets(data, heads, num_tokens)
    total = int(budgets.sum())
    expected = selection.select(scores, budgets, total)
    assert torch.equal(cuda.select(scores, budgets, total), expected)
    alpha = data.draw(st.sampled_from((0.0, 0.3, 0.5, 1.0)))
    mask = selection.stage_1_mask(scores, budgets, alpha)
    assert torch.equal(cuda.stage_1_mask(scores, budgets, alpha), mask)


@pytest.mark.parametrize(
    "values", [(0.0, -0.0), (torch.nan, torch.inf), (1e-45, 0.0), (-1.0, -2.0)]
)
def test_the_order_of_scores_is_that_of_a_stable_sort(values: tuple[float, float]) -> None:
    scores = torch.tensor([values * 3 + values[:1], values[::-1] * 3 + values[1:]]).to(DEVICE)
    for count in range(8):
        budgets = torch.tensor([count, 7 - count]).to(DEVICE)
        expected = selection.select(scores, budgets, 7)
        assert torch.equal(cuda.select(scores, budgets, 7), expected)


@brief
@given(
    seed=seeds,
    heads=st.integers(1, 5),
    block_size=st.sampled_from((1, 4, 16)),
    num_packed=st.integers(1, 5),
    more=st.integers(0, 20),
    tied=st.booleans(),
    safeguard=st.sampled_from((0.0, 0.2, 0.37, 1.0)),
    floor=st.sampled_from(("blend", "minimum")),
)
def test_allocation(
    seed: int,
    heads: int,
    block_size: int,
    num_packed: int,
    more: int,
    tied: bool,
    safeguard: float,
    floor: str,
) -> None:
    scores = ranked(seed, heads, num_packed * block_size + more, tied)
    config = EvictionConfig.parse({"safeguard": safeguard, "floor": floor})
    arguments = (scores, num_packed, block_size, config)
    assert torch.equal(cuda.adaptive_pages(*arguments), allocation.adaptive_pages(*arguments))
    assert torch.equal(cuda.shared_pages(*arguments), allocation.shared_pages(*arguments))


def test_the_lower_head_gets_a_page_that_two_heads_share() -> None:
    """Two heads have six of the twelve best entries each, a page and a half."""
    scores = torch.zeros(3, 8)
    scores[1:, :6] = 1.0
    pages = cuda.shared_pages(scores.to(DEVICE), 1, 4, EvictionConfig())
    assert pages.tolist() == [0, 2, 1]


@brief
@given(batches(), st.integers(0, 3), st.sampled_from((torch.int32, torch.int64)), st.integers(0, 2))
def test_page_tables_fill_the_buffers_that_the_reference_fills(
    batch: Batch, more: int, integers: torch.dtype, first_layer: int
) -> None:
    *tensors, offsets, block_size, num_blocks, _ = batch.inputs(integers)
    inputs = [part.to(DEVICE) for part in tensors]
    # A layer's offsets as they lie in the state, requests in front.
    inputs.append(offsets.to(DEVICE).transpose(0, 1).contiguous().transpose(0, 1))
    filled = []
    for build in (cuda.headwise_page_table, page_table.headwise_page_table):
        buffers = PageTable(*(part.to(DEVICE) for part in batch.buffers(more)))
        out = PageTable(*(part[:, :-1] for part in buffers))
        assert build(*inputs, block_size, num_blocks, first_layer, out) is out
        filled.append(buffers)
    assert torch.equal(filled[0].pages, filled[1].pages)
    assert torch.equal(filled[0].seq_lens, filled[1].seq_lens)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
def test_entries_are_moved_as_bytes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    retained = torch.tensor([0, 5, 19, 20, 41, 59] * 7).to(DEVICE)

    def drawn(*shape: int) -> torch.Tensor:
        """Any bit pattern, NaN among them."""
        size = (*shape[:-1], shape[-1] * dtype.itemsize)
        return (
            torch.randint(256, size, dtype=torch.uint8, generator=generator).to(DEVICE).view(dtype)
        )

    def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(torch.uint8)

    entries = drawn(30, 3, 2, 12)[:, :, 1].transpose(0, 1)
    expected = compaction.gather_entries(entries, retained, 20)
    assert torch.equal(as_bytes(cuda.gather_entries(entries, retained, 20)), as_bytes(expected))
    # Every other block of a larger allocation, as with layers side by side.
    cache = drawn(6, 2, 3, 4, 24)[:, 1]
    blocks = torch.tensor([5, 0, 3, 2, 4]).to(DEVICE)
    gathered = cuda.gather_from_blocks(cache, blocks, retained, 20)
    expected = compaction.gather_from_blocks(cache, blocks, retained, 20)
    assert torch.equal(as_bytes(gathered), as_bytes(expected))
    slots, other = compaction.packed_slots(blocks[2:], 3, 4), cache.clone()
    cuda.scatter_entries(cache, slots, gathered[: slots.numel()])
    compaction.scatter_entries(other, slots, expected[: slots.numel()])
    assert torch.equal(as_bytes(cache), as_bytes(other))


SERVED = [case for case in METHOD_CASES if not METHODS[case.method].whole_prompt]


@pytest.mark.parametrize(
    ("case", "absent"),
    [
        *(pytest.param(case, None, id=case.name) for case in SERVED),
        *(pytest.param(case, [16, 40], id=f"{case.name}-uneven") for case in ROUND_CASES),
    ],
)
def test_the_whole_choice_waits_for_nothing_and_is_the_references(
    case: MethodCase, absent: list[int] | None
) -> None:
    """Rounding may swap entries on the cut; every other choice is the same."""
    shape = Shape(2, 2, 8, 8, 3, 75, 3)
    layer = random_layer(shape, 5, torch.float32)
    value = layer.value[:, : shape.num_tokens].to(DEVICE)
    projection = OutputProjection.of(layer.output_projection.to(DEVICE))
    query, key = layer.query.to(DEVICE), layer.key.to(DEVICE)
    inputs = scoring_inputs(query, key, shape.scale, value, projection)
    if absent is not None:
        inputs = replace(inputs, num_absent=torch.tensor(absent).to(DEVICE))
    arguments = (inputs, 3, 8, case.config(window=shape.window))
    expected = retain(*arguments)
    with unsynchronised():
        retention = retain(*arguments, kernels=cuda.KERNELS)
    assert torch.equal(retention.offsets, expected.offsets)
    both = set(retention.retained.tolist()) & set(expected.retained.tolist())
    assert len(both) >= expected.retained.numel() - 1


def test_compaction_and_page_tables_wait_for_nothing() -> None:
    batch = Batch(4, 2, [[0, 3, 8, 6, 4]], [18], [1], [3], [[[3, 1]]])
    *tensors, block_size, num_blocks, first_layer = batch.inputs()
    inputs = [part.to(DEVICE) for part in tensors]
    buffers = PageTable(*(part.to(DEVICE) for part in batch.buffers(2)))
    out = PageTable(*(part[:, :-1] for part in buffers))
    cache = torch.zeros(9, 2, 4, 16, device=DEVICE)
    retained = torch.arange(16, device=DEVICE)
    blocks = torch.tensor([7, 3, 8], device=DEVICE)
    with unsynchronised():
        gathered = cuda.gather_from_blocks(cache, blocks, retained, 12)
        cuda.scatter_entries(cache, compaction.packed_slots(blocks[1:], 2, 4), gathered)
        cuda.headwise_page_table(*inputs, block_size, num_blocks, first_layer, out)


@pytest.mark.parametrize("synchronise", SYNCHRONISING.values(), ids=SYNCHRONISING)
def test_the_guard_finds_synchronisations(synchronise: Callable[[torch.Tensor], object]) -> None:
    numbers = torch.tensor([1.0, 2.0]).to(DEVICE)
    with unsynchronised():
        numbers.sort(stable=True)
        torch.nonzero_static(numbers, size=1)
    with pytest.raises(SynchronisationError if DEVICE == "cpu" else RuntimeError), unsynchronised():
        synchronise(numbers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["adakv-perturb", "thetakv"])
def test_a_broken_model_does_not_break_the_bookkeeping(method: str, dtype: torch.dtype) -> None:
    shape = Shape(2, 2, 8, 8, 3, 51, 2)
    layer = random_layer(shape, 0, dtype)
    layer.key[1, 7:12], layer.value[0, 3:8] = torch.nan, torch.nan
    projection = OutputProjection.of(layer.output_projection.to(DEVICE))
    value = layer.value[:, : shape.num_tokens].to(DEVICE)
    config = MethodCase(method).config(window=3)
    query, key = layer.query.to(DEVICE), layer.key.to(DEVICE)
    inputs = scoring_inputs(query, key, shape.scale, value, projection)
    retention = retain(inputs, 2, 8, config, kernels=cuda.KERNELS)
    assert int(retention.offsets[-1]) == 4
    assert len(set(retention.retained.tolist())) == 32
    assert int(retention.retained.min()) >= 0
    assert int(retention.retained.max()) < 2 * shape.num_tokens


def test_float64_goes_to_the_reference() -> None:
    shape = Shape(2, 2, 8, 8, 3, 51, 2)
    layer = random_layer(shape, 1)
    projection = OutputProjection.of(layer.output_projection.to(DEVICE))
    value = layer.value[:, : shape.num_tokens].to(DEVICE)
    for method in ("adakv-perturb", "defensivekv", "thetakv"):
        config = MethodCase(method).config(window=3)
        query, key = layer.query.to(DEVICE), layer.key.to(DEVICE)
        inputs = scoring_inputs(query, key, shape.scale, value, projection)
        expected = retain(inputs, 2, 8, config)
        retention = retain(inputs, 2, 8, config, kernels=cuda.KERNELS)
        assert torch.equal(retention.retained, expected.retained)


@brief
@given(
    shape=shapes(max_tokens=100),
    seed=seeds,
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from((1, 4, 16, 17)),
)
def test_extremes(shape: Shape, seed: int, dtype: torch.dtype, size: int) -> None:
    check_extremes(cuda.KERNELS, shape, seed, dtype, size, DEVICE)


@brief
@given(
    shape=shapes(max_tokens=100),
    seed=seeds,
    dtype=st.sampled_from(DTYPES),
    num_segments=st.integers(1, 5),
)
def test_criticality(shape: Shape, seed: int, dtype: torch.dtype, num_segments: int) -> None:
    check_criticality(cuda.KERNELS, shape, seed, dtype, num_segments, DEVICE)
