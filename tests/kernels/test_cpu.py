"""The CPU kernels compute what their references compute."""

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.critical_inputs import check_criticality, check_extremes
from tests.kernels.probe_inputs import ROTATIONS, check_imitated, probe_inputs
from tests.method_cases import MethodCase, every_method_case
from tests.strategies import (
    Shape,
    few,
    head_sizes,
    kv_heads,
    random_layer,
    scoring_inputs,
    seeds,
    shapes,
    some,
)
from tests.uneven import every_round_case, retain_uneven, some_absent, unevens
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels import cpu, tiers
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.machine import fast_dtype
from vllm_kvselect.methods.choice import retain
from vllm_kvselect.paging import compaction
from vllm_kvselect.scoring import defensivekv, r_kv, snapkv, value_norms
from vllm_kvselect.scoring.inputs import Scorer, ScoringInputs
from vllm_kvselect.scoring.value_norms import OutputProjection
from vllm_kvselect.selecting import allocation, selection

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WINDOW_SCORERS = (
    snapkv.snapkv_scores,
    defensivekv.mean_attention,
    defensivekv.defensive_scores,
)
TIERS = ["float32"] if fast_dtype() == torch.float32 else ["native", "float32"]
"""Float32 tiles everywhere; native tiles too where they are others."""
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module", autouse=True, params=TIERS)
def tier(request: pytest.FixtureRequest) -> Iterator[None]:
    cpu.load()
    with nullcontext() if request.param == "native" else tiers.float32_tiles():
        yield


def ranked(seed: int, heads: int, num_tokens: int, tied: bool) -> torch.Tensor:
    """Scores, rows apart from each other as in a slice, with an infinity as selection has them."""
    scores = torch.rand(heads, num_tokens + 3, generator=torch.Generator().manual_seed(seed))
    if tied:
        scores = (scores * 4).round() / 4 - 0.5
    scores[0, 0] = torch.inf
    return scores[:, :num_tokens]


def drawn_budgets(data: st.DataObject, heads: int, num_tokens: int) -> torch.Tensor:
    each = st.lists(st.integers(0, num_tokens), min_size=heads, max_size=heads)
    return torch.tensor(data.draw(each))


def test_twins_have_the_names_and_signatures_of_their_references() -> None:
    replaced = 0
    for part in fields(Kernels):
        reference, twin = getattr(REFERENCES, part.name), getattr(cpu.KERNELS, part.name)
        assert twin.__name__ == reference.__name__ == part.name
        assert inspect.signature(twin) == inspect.signature(reference)
        replaced += twin is not reference and twin is getattr(cpu, part.name)
    assert replaced >= 8


@some
@given(
    shape=shapes(max_tokens=300),
    seed=seeds,
    dtype=st.sampled_from(DTYPES),
    kernel_size=st.sampled_from((1, 3, 7, 63)),
    far=st.booleans(),
    with_sinks=st.booleans(),
    is_uneven=st.booleans(),
    scorer=st.sampled_from(WINDOW_SCORERS),
)
def test_scores_of_the_window(
    shape: Shape,
    seed: int,
    dtype: torch.dtype,
    kernel_size: int,
    far: bool,
    with_sinks: bool,
    is_uneven: bool,
    scorer: Scorer,
) -> None:
    layer = random_layer(shape, seed, dtype, with_sinks=with_sinks)
    if far:  # one key takes all attention: the others' weights vanish without being lost
        layer.key[:, 3] *= 20
    # Every other channel block of wider rows, as in the output of a fused projection.
    wide = layer.key.transpose(0, 1).repeat(1, 2, 1)
    key = wide[:, : shape.num_kv_heads].transpose(0, 1)
    config = EvictionConfig(window=shape.window, kernel_size=kernel_size)
    sinks = None if layer.sinks is None else layer.sinks.double()
    inputs = scoring_inputs(layer.query.double(), key.double(), shape.scale, sinks=sinks)
    given_inputs = scoring_inputs(layer.query, key, shape.scale, sinks=layer.sinks)
    if is_uneven:
        absent = some_absent(shape, seed)
        inputs, given_inputs = (replace(i, num_absent=absent) for i in (inputs, given_inputs))
    expected = scorer(inputs, config)
    scores = cpu.KERNELS.scorer(scorer)(given_inputs, config)
    assert scores.dtype == torch.float32
    # A logit of n products is off by n eps of the sum of magnitudes; a weight by twice that.
    group = layer.query.view(shape.window, shape.num_kv_heads, shape.group, -1).double().abs()
    magnitude = torch.einsum("wkgd,ktd->kgwt", group, key.double().abs()).max() * shape.scale
    largest = float(magnitude) + (0 if sinks is None else float(sinks.abs().max()))
    bound = 2 * (shape.head_size + 4) * EPS * largest + (key.shape[1] + 8) * EPS
    torch.testing.assert_close(scores.double(), expected, rtol=bound, atol=2.0**-120)


@some
@given(
    shape=shapes(max_tokens=300),
    seed=seeds,
    dtype=st.sampled_from(DTYPES),
    kind=ROTATIONS,
    first_position=st.integers(0, 600),
)
def test_imitated_scores(
    shape: Shape, seed: int, dtype: torch.dtype, kind: str, first_position: int
) -> None:
    inputs = probe_inputs(shape, seed, dtype, kind)
    check_imitated(cpu.imitated_scores(inputs, first_position), inputs, first_position)


@some
@given(
    shape=shapes(max_tokens=300),
    seed=seeds,
    dtype=st.sampled_from(DTYPES),
    repeats=st.booleans(),
    is_uneven=st.booleans(),
    data=st.data(),
)
def test_keys_that_repeat_others(
    shape: Shape,
    seed: int,
    dtype: torch.dtype,
    repeats: bool,
    is_uneven: bool,
    data: st.DataObject,
) -> None:
    layer = random_layer(shape, seed, dtype)
    if repeats:
        layer.key[:, 1::3] = layer.key[:, :1]
    inputs = scoring_inputs(layer.query, layer.key, shape.scale)
    if is_uneven:
        inputs = replace(inputs, num_absent=some_absent(shape, seed))
    exact = replace(inputs, query=inputs.query.double(), key=inputs.key.double())
    threshold = gap_between_cosines(exact.key, data.draw(st.floats(0, 0.9)))
    config = EvictionConfig(r_kv_lam=0.0, r_kv_threshold=threshold, window=shape.window)
    scores = cpu.KERNELS.scorer(r_kv.r_kv_scores)(inputs, config)
    assert scores.dtype == torch.float32
    # A cosine of n products is off by n eps, a mean of cosines by as many more as there are. A
    # share of their softmax is off by so much, and a difference of two shares by twice as much.
    num_tokens = layer.key.shape[1]
    largest = float(r_kv.redundancy(exact, threshold).max())
    bound = 4 * (shape.head_size + 2 * num_tokens + 8) * EPS * largest
    expected = r_kv.r_kv_scores(exact, config)
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=bound)


def gap_between_cosines(key: torch.Tensor, near: float) -> float:
    """A threshold near which no cosine lies, so that rounding decides nothing."""
    directions = torch.nn.functional.normalize(key, dim=-1)
    cosines = (directions @ directions.transpose(1, 2)).flatten()
    close = cosines[(cosines - near).abs() < 0.1]
    bounds = torch.tensor([near - 0.1, near + 0.1], dtype=torch.float64)
    ordered = torch.cat((close, bounds)).sort().values
    widest = int(ordered.diff().argmax())
    return float((ordered[widest] + ordered[widest + 1]) / 2)


@pytest.mark.parametrize("num_tokens", [2753, 8200])
def test_prompts_longer_than_what_is_kept_are_scored_alike(num_tokens: int) -> None:
    """96 rows: the weights of 2,730 tokens are kept, those beyond are computed twice."""
    generator = torch.Generator().manual_seed(num_tokens)
    query = torch.randn(32, 3, 16, generator=generator)
    key = torch.randn(1, num_tokens, 16, generator=generator)
    config = EvictionConfig(kernel_size=1)
    expected = snapkv.snapkv_scores(scoring_inputs(query.double(), key.double(), 0.25), config)
    scores = cpu.snapkv_scores(scoring_inputs(query, key, 0.25), config)
    # Logits stay below 16 here, and so does the sum of magnitudes times the scale below 64.
    bound = 2 * 20 * EPS * 64 + (num_tokens + 8) * EPS
    torch.testing.assert_close(scores.double(), expected, rtol=bound, atol=0)


def test_exponentials_are_exact_to_a_few_digits_of_float32_over_their_whole_range() -> None:
    """One query, head size 2: the weights are a softmax of the keys' first channel alone."""
    logits = torch.cat((torch.linspace(-80, 0, 4001), torch.zeros(1)))
    key = torch.stack((logits, torch.zeros_like(logits)), dim=-1)[None]
    query = torch.tensor([[[1.0, 0.0]]])
    config = EvictionConfig(window=1, kernel_size=1)
    scores = cpu.snapkv_scores(scoring_inputs(query, key, 1.0), config)[0]
    expected = torch.softmax(logits.double(), dim=0)[:-1]
    # A logit of 80 in units of log 2 is rounded to half a unit in its last place: 115 eps / 2.
    # Rows of padding, up to 15, add the smallest exponential each.
    torch.testing.assert_close(scores.double(), expected, rtol=64 * EPS, atol=15 * 2.0**-126)


@some
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
    norms = cpu.projected_value_norms(value, cpu.pack(OutputProjection.of(weight)))
    expected = value_norms.value_norms(value.double(), weight.double())
    # A product is off by `size` eps of its magnitudes, and a sum by as many as it has terms.
    magnitude = value_norms.value_norms(value.double().abs(), weight.double().abs())
    bound = (size + group * hidden_size) * EPS * magnitude
    assert ((norms - expected).abs() <= bound).all()


@some
@given(
    seed=seeds,
    heads=kv_heads,
    size=head_sizes,
    num_tokens=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    alpha=st.sampled_from((0.0, 0.25, 0.5, 1.0)),
    eps=st.sampled_from((0.0, 1e-4, 1.0)),
    tied=st.booleans(),
    data=st.data(),
)
def test_select_pruned(
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
    """Retains what selection with all norms retains, all of them the kernel's own."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(heads, num_tokens, size, generator=generator).to(dtype)
    strength = torch.rand(heads, size, 1, 1, generator=generator) ** 6
    weight = (torch.randn(heads, size, 2, 40, generator=generator) * strength).to(dtype)
    projection = cpu.pack(OutputProjection.of(weight))
    scores, weights = (
        ranked(each, heads, num_tokens, tied).abs().nan_to_num(posinf=1.0)
        for each in (seed, data.draw(seeds))
    )
    budgets = drawn_budgets(data, heads, num_tokens)
    total = int(budgets.sum())
    every = cpu.projected_value_norms(value, cpu.pack(OutputProjection.of(weight)))
    stage_1 = selection.stage_1_mask(scores, budgets, alpha)
    keys = selection.stage_2_keys(weights, every, stage_1, eps)
    arguments = (scores, weights, value, projection, budgets)
    retained = cpu.select_pruned(*arguments, total, alpha, eps)
    assert torch.equal(retained, selection.select(keys, budgets, total))
    norms = cpu.select_and_project(*arguments, alpha, eps)[1]
    assert torch.equal(norms[norms != 0], every[norms != 0])


def test_most_norms_are_not_needed() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(2, 500, 64, generator=generator)
    projection = cpu.pack(OutputProjection.of(torch.randn(2, 64, 2, 80, generator=generator)))
    scores = torch.rand(2, 500, generator=generator) ** 8
    budgets = torch.tensor([40, 20])
    arguments = (scores, scores, value, projection, budgets, 0.5, 1e-4)
    norms = cpu.select_and_project(*arguments)[1]
    assert ((norms != 0).sum(dim=1) < 3 * budgets).all()


@some
@given(
    seed=seeds, heads=kv_heads, num_tokens=st.integers(1, 99), tied=st.booleans(), data=st.data()
)
def test_selection(seed: int, heads: int, num_tokens: int, tied: bool, data: st.DataObject) -> None:
    scores = ranked(seed, heads, num_tokens, tied)
    budgets = drawn_budgets(data, heads, num_tokens)
    total = int(budgets.sum())
    expected = selection.select(scores, budgets, total)
    assert torch.equal(cpu.select(scores, budgets, total), expected)
    alpha = data.draw(st.sampled_from((0.0, 0.3, 0.5, 1.0)))
    mask = selection.stage_1_mask(scores, budgets, alpha)
    assert torch.equal(cpu.stage_1_mask(scores, budgets, alpha), mask)


@some
@given(
    seed=seeds,
    heads=st.integers(1, 9),
    block_size=st.sampled_from((1, 4, 16)),
    num_packed=st.integers(1, 5),
    more=st.integers(0, 20),
    tied=st.booleans(),
    safeguard=st.sampled_from((0.0, 0.2, 0.37, 1.0)),
    floor=st.sampled_from(("blend", "minimum")),
)
def test_adaptive_pages(
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
    assert torch.equal(cpu.adaptive_pages(*arguments), allocation.adaptive_pages(*arguments))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_pages_and_entries_are_moved_as_they_are(dtype: torch.dtype) -> None:
    cache = torch.randn(50, 2 * 96).to(dtype)[:, :128]
    pages, places = torch.randperm(50)[:23], torch.randperm(128)[:96].to(torch.int32)
    expected = compaction.read_pages(cache, pages, places)
    assert torch.equal(cpu.read_pages(cache, pages, places), expected)
    slots, block_size = torch.randperm(50 * 8)[:77], 8
    expected = compaction.read_entries(cache, slots, places, block_size)
    assert torch.equal(cpu.read_entries(cache, slots, places, block_size), expected)
    page, offset = 49, 3  # an entry of which all is known
    assert torch.equal(
        compaction.read_entries(cache, torch.tensor([page * 8 + offset]), places, block_size)[0],
        cache[page, places[offset * 12 : (offset + 1) * 12].long()],
    )


def packed(inputs: ScoringInputs) -> ScoringInputs:
    """The same, with the output projection as the kernels read it."""
    projection = inputs.output_projection
    return replace(inputs, output_projection=projection and cpu.pack(projection))


@every_method_case
@few
@given(shape=shapes(), seed=seeds)
def test_what_is_retained_is_as_good_as_what_the_reference_retains(
    case: MethodCase, shape: Shape, seed: int
) -> None:
    """Rounding may swap entries on the cut; every other choice is the same."""
    layer = random_layer(shape, seed, torch.float32)
    inputs = case.inputs(shape, layer)
    options = (shape.num_packed, shape.block_size, case.config(window=shape.window))
    expected = retain(inputs, *options)
    retention = retain(packed(inputs), *options, kernels=cpu.KERNELS)
    both = set(retention.retained.tolist()) & set(expected.retained.tolist())
    assert len(both) >= expected.retained.numel() - 2


@every_round_case
@few
@given(data=st.data())
def test_of_heads_of_different_lengths_as_much_is_retained(
    case: MethodCase, data: st.DataObject
) -> None:
    uneven = data.draw(unevens(case, torch.float32))
    expected = retain_uneven(case, uneven)
    retention = retain_uneven(case, uneven, cpu.KERNELS, packed)
    both = set(retention.retained.tolist()) & set(expected.retained.tolist())
    assert len(both) >= expected.retained.numel() - 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_bad", [1, 5])
@every_method_case
def test_a_broken_model_does_not_break_the_bookkeeping(
    case: MethodCase, num_bad: int, dtype: torch.dtype
) -> None:
    shape = Shape(3, 2, 8, 8, 3, 51, 2)
    layer = random_layer(shape, 0, dtype)
    layer.key[1, 7 : 7 + num_bad], layer.value[2, 3 : 3 + num_bad] = torch.nan, torch.nan
    config = case.config(window=shape.window)
    retention = retain(packed(case.inputs(shape, layer)), 2, 8, config, kernels=cpu.KERNELS)
    assert int(retention.offsets[-1]) == 6
    assert len(set(retention.retained.tolist())) == 48
    assert int(retention.retained.min()) >= 0
    assert int(retention.retained.max()) < 3 * shape.num_tokens


def test_other_dtypes_go_to_the_reference() -> None:
    shape = Shape(2, 2, 8, 8, 3, 51, 2)
    config = MethodCase("adakv-perturb").config(window=3)
    layer = random_layer(shape, 1, torch.float64)
    projection = cpu.pack(OutputProjection.of(layer.output_projection))
    value = layer.value[:, : shape.num_tokens]
    arguments = (
        scoring_inputs(layer.query, layer.key, shape.scale, value, projection),
        2,
        8,
        config,
    )
    expected = retain(*arguments)
    assert torch.equal(retain(*arguments, kernels=cpu.KERNELS).retained, expected.retained)


@some
@given(
    shape=shapes(max_tokens=300),
    seed=seeds,
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from((1, 4, 16)),
)
def test_extremes(shape: Shape, seed: int, dtype: torch.dtype, size: int) -> None:
    check_extremes(cpu.KERNELS, shape, seed, dtype, size)


@some
@given(
    shape=shapes(max_tokens=100),
    seed=seeds,
    dtype=st.sampled_from(DTYPES),
    num_segments=st.integers(1, 5),
)
def test_criticality(shape: Shape, seed: int, dtype: torch.dtype, num_segments: int) -> None:
    check_criticality(cpu.KERNELS, shape, seed, dtype, num_segments)
