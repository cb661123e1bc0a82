"""The CPU kernels compute what their references compute."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.backend import EPS, Backend
from tests.kernels.twins import *  # noqa: F403 (tests)
from tests.method_cases import SERVED_CASES, MethodCase
from tests.strategies import Shape, few, random_layer, scoring_inputs, seeds, shapes, some
from tests.uneven import every_round_case, retain_uneven, some_absent, unevens
from vllm_kvselect.choice import retain
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels import cpu, tiers
from vllm_kvselect.machine import fast_dtype
from vllm_kvselect.scoring import r_kv, snapkv

BACKEND = Backend(
    cpu.KERNELS,
    cpu,
    lambda *arguments: cpu.select_and_project(*arguments)[1],
    SERVED_CASES,
    pack=cpu.pack,
)
TIERS = ["float32"] if fast_dtype() == torch.float32 else ["native", "float32"]
"""Float32 tiles everywhere; native tiles too where they are others."""


@pytest.fixture(scope="module", autouse=True, params=TIERS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    cpu.load()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "float32":
            patch.setattr(tiers, "_multiplies_bfloat16", lambda: False)
        yield BACKEND


@some
@given(
    shape=shapes(max_tokens=300),
    seed=seeds,
    dtype=st.sampled_from(BACKEND.dtypes),
    repeats=st.booleans(),
    is_uneven=st.booleans(),
    data=st.data(),
)
def test_keys_that_repeat_others(
    shape: Shape, seed: int, dtype: torch.dtype, repeats: bool, is_uneven: bool, data: st.DataObject
) -> None:
    layer = random_layer(shape, seed, dtype)
    if repeats:
        layer.key[:, 1::3] = layer.key[:, :1]
    inputs = scoring_inputs(layer.query, layer.key, shape.scale)
    if is_uneven:
        inputs = replace(inputs, num_absent=some_absent(shape, seed))
    exact = replace(inputs, query=inputs.query.double(), key=inputs.key.double())
    threshold = gap_between_cosines(exact.key, data.draw(st.floats(0, 0.9)))
    config = EvictionConfig(
        method="adakv-perturb", r_kv_lam=0.0, r_kv_threshold=threshold, window=shape.window
    )
    scores = cpu.KERNELS.scorer(r_kv.r_kv_scores)(inputs, config)
    assert scores.dtype == torch.float32
    # A cosine of n products is off by n eps, a mean of cosines by as many more as there are. A
    # share of their softmax is off by so much, and a difference of two shares by twice as much.
    num_tokens = layer.key.shape[1]
    largest = float(r_kv.redundancy(r_kv.similarities(exact, threshold), exact).max())
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
    config = EvictionConfig(method="adakv-perturb", kernel_size=1)
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
    config = EvictionConfig(method="adakv-perturb", window=1, kernel_size=1)
    scores = cpu.snapkv_scores(scoring_inputs(query, key, 1.0), config)[0]
    expected = torch.softmax(logits.double(), dim=0)[:-1]
    # A logit of 80 in units of log 2 is rounded to half a unit in its last place: 115 eps / 2.
    # Rows of padding, up to 15, add the smallest exponential each.
    torch.testing.assert_close(scores.double(), expected, rtol=64 * EPS, atol=15 * 2.0**-126)


@pytest.mark.parametrize("case", SERVED_CASES, ids=[case.name for case in SERVED_CASES])
@few
@given(shape=shapes(), seed=seeds)
def test_what_is_retained_is_as_good_as_what_the_reference_retains(
    case: MethodCase, shape: Shape, seed: int
) -> None:
    """Rounding may swap entries on the cut; every other choice is the same."""
    layer = random_layer(shape, seed, torch.float32)
    inputs = case.inputs(shape, layer)
    options = (shape.num_packed, shape.block_size, case.config(window=shape.window))
    expected = retain([inputs], *options)
    retention = retain([BACKEND.ready(inputs)], *options, kernels=cpu.KERNELS)
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
    retention = retain_uneven(case, uneven, cpu.KERNELS, BACKEND.ready)
    both = set(retention.retained.tolist()) & set(expected.retained.tolist())
    assert len(both) >= expected.retained.numel() - 2
