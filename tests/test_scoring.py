"""Scorers of a layer's tensors against their oracles, and what each promises beside that."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.strategies import (
    Shape,
    few,
    kv_heads,
    many,
    random_layer,
    scoring_inputs,
    seeds,
    shapes,
    some,
    windows,
)
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring import h2o, r_kv
from vllm_kvselect.scoring.at_random import random_scores
from vllm_kvselect.scoring.defensivekv import defensive_scores, mean_attention
from vllm_kvselect.scoring.h2o import accumulate, h2o_scores
from vllm_kvselect.scoring.inputs import Scorer, ScoringInputs
from vllm_kvselect.scoring.keydiff import keydiff_scores
from vllm_kvselect.scoring.knorm import knorm_scores
from vllm_kvselect.scoring.r_kv import importance, r_kv_scores, redundancy, similarities
from vllm_kvselect.scoring.snapkv import snapkv_scores
from vllm_kvselect.scoring.streaming_llm import streaming_llm_scores
from vllm_kvselect.scoring.thetakv import smoothed

DEFAULTS = EvictionConfig(method="snapkv")
SMALL = Shape(2, 2, 8, 8, 3, 51, 2)


class Lists(NamedTuple):
    """A layer as oracles read it."""

    query: oracle.Cube
    key: oracle.Cube
    scale: float
    window: int
    sinks: oracle.Vector | None


EXPECTED: dict[Scorer, Callable[[Lists, Any], list[list[float]]]] = {
    keydiff_scores: lambda of, _: oracle.keydiff_scores(of.key, of.window),
    knorm_scores: lambda of, _: oracle.knorm_scores(of.key, of.window),
    h2o_scores: lambda of, _: oracle.h2o_scores(*of),
    mean_attention: lambda of, _: oracle.snapkv_scores(*of[:3], 1, sinks=of.sinks),
    snapkv_scores: lambda of, config: oracle.snapkv_scores(
        *of[:3], config.kernel_size, config.pooling, config.group_reduction, of.sinks
    ),
    defensive_scores: lambda of, config: oracle.defensive_scores(
        *of[:3], config.kernel_size, config.pooling, of.sinks
    ),
    r_kv_scores: lambda of, config: oracle.r_kv_scores(
        *(*of[:3], config.kernel_size, config.pooling),
        *(config.r_kv_lam, config.r_kv_threshold, of.sinks),
    ),
}
DIFFERENCES = (keydiff_scores, r_kv_scores)
"""What is near nothing is a difference of what is not."""
every_scorer = pytest.mark.parametrize("scorer", EXPECTED, ids=lambda each: each.__name__)
options = st.fixed_dictionaries(
    {
        "kernel_size": st.sampled_from((1, 5, 7, 101)),
        "pooling": st.sampled_from(("max", "mean")),
        "group_reduction": st.sampled_from(("mean", "max")),
        "r_kv_lam": st.sampled_from((0.0, 0.1, 1.0)),
        "r_kv_threshold": st.sampled_from((0.0, 0.25, 0.5)),
    }
)


@every_scorer
@settings(few, max_examples=50)
@given(shape=shapes(max_tokens=32), seed=seeds, values=options, with_sinks=st.booleans())
def test_scores_equal_the_oracle(
    scorer: Scorer, shape: Shape, seed: int, values: dict[str, Any], with_sinks: bool
) -> None:
    layer = random_layer(shape, seed, with_sinks=with_sinks)
    config = EvictionConfig.parse({"method": "snapkv", "window": shape.window, **values})
    query = layer.prompt_query if scorer is h2o_scores else layer.query
    scores = scorer(scoring_inputs(query, layer.key, shape.scale, sinks=layer.sinks), config)
    sinks = None if layer.sinks is None else layer.sinks.tolist()
    lists = Lists(query.tolist(), layer.key.tolist(), shape.scale, shape.window, sinks)
    expected = torch.tensor(EXPECTED[scorer](lists, config), dtype=torch.float64)
    atol = 1e-12 if scorer in DIFFERENCES else 1e-300
    torch.testing.assert_close(scores, expected, rtol=1e-12, atol=atol)
    assert (scores >= 0).all()


@every_scorer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_are_float32_even_where_squares_overflow(scorer: Scorer, dtype: torch.dtype) -> None:
    layer = random_layer(SMALL, 0, dtype)
    query = layer.prompt_query if scorer is h2o_scores else layer.query
    scores = scorer(scoring_inputs(query, 300 * layer.key), DEFAULTS)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()


@many
@given(kv_heads, st.integers(1, 60), windows)
def test_streaming_llm_scores_the_latest_first(
    num_kv_heads: int, num_scored: int, window: int
) -> None:
    query = torch.empty(window, num_kv_heads, 8)
    key = torch.empty(num_kv_heads, num_scored + window, 8)
    scores = streaming_llm_scores(scoring_inputs(query, key), DEFAULTS)
    assert scores.dtype == torch.float32
    expected = list(reversed(range(num_scored)))
    assert [oracle.best_first(row) for row in scores.tolist()] == [expected] * num_kv_heads


def drawn(num_kv_heads: int, num_scored: int, seed: int = 0, layer: int = 0) -> torch.Tensor:
    query, key = torch.empty(4, num_kv_heads, 8), torch.empty(num_kv_heads, num_scored + 4, 8)
    config = EvictionConfig(method="random", seed=seed)
    return random_scores(scoring_inputs(query, key, layer_index=layer), config)


@many
@given(kv_heads, st.integers(1, 60), st.integers(0, 2**32 - 1), st.integers(0, 200))
def test_random_scores_equal_the_oracle(
    num_heads: int, num_scored: int, seed: int, layer: int
) -> None:
    scores = drawn(num_heads, num_scored, seed, layer)
    assert scores.dtype == torch.float32
    expected = oracle.random_scores(seed, layer, num_heads, num_scored)
    assert (scores * 2**24).tolist() == expected


@pytest.mark.parametrize("other", [(1, 0), (0, 1)], ids=["seed", "layer"])
def test_seeds_layers_and_heads_draw_independently(other: tuple[int, int]) -> None:
    """Of 10,000 entries half lie in both upper halves by chance: 2,500 +- 4 x 43."""
    first, second = drawn(2, 10_000), drawn(2, 10_000, *other)
    for a, b in [(first[0], second[0]), (first[0], first[1]), (first[1], second[0])]:
        both = int(((a > 0.5) & (b > 0.5)).sum())
        assert abs(both - 2500) < 175


def test_random_scores_are_spread_evenly() -> None:
    """Each tenth of [0, 1) holds a tenth of 100,000 scores: 10,000 +- 5 x 95."""
    histogram = torch.histc(drawn(1, 100_000), bins=10, min=0, max=1)
    assert (histogram - 10_000).abs().max() < 475


def test_short_keys_come_first_as_published() -> None:
    key = random_layer(SMALL, 0).key
    key[1, 4] = 0
    scores = knorm_scores(scoring_inputs(key[0, :2, None], key), DEFAULTS)
    published = -key[:, :-2].norm(dim=-1)
    assert torch.equal(scores.argsort(dim=1), published.argsort(dim=1))
    assert float(scores[1, 4]) == 1


def test_rows_without_any_mass_do_not_become_nan() -> None:
    """Attention that underflows to zero everywhere before the window."""
    query, key = torch.full((1, 1, 8), 100.0), torch.zeros(1, 20, 8)
    key[0, 19] = 100.0
    config = EvictionConfig(method="defensivekv", pooling="mean")
    assert not defensive_scores(scoring_inputs(query, key), config).any()


@some
@given(
    data=st.data(),
    shape=shapes(max_tokens=48),
    seed=seeds,
    block=st.integers(1, 20_000),
    with_sinks=st.booleans(),
)
def test_chunks_add_up_whatever_their_sizes(
    data: st.DataObject, shape: Shape, seed: int, block: int, with_sinks: bool
) -> None:
    layer = random_layer(shape, seed, with_sinks=with_sinks)
    length = shape.num_prompt_tokens
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=4)))
    total = torch.zeros(shape.num_kv_heads, length, dtype=torch.float64)

    def paid(start: int, stop: int) -> torch.Tensor:
        query, key = layer.prompt_query[start:stop], layer.key[:, :stop]
        return accumulate(scoring_inputs(query, key, shape.scale, sinks=layer.sinks))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(h2o, "block_elements", lambda _: block)
        for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
            total[:, :stop] += paid(start, stop)
    torch.testing.assert_close(total, paid(0, length), rtol=1e-12, atol=0)


def test_memory_is_bounded_by_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, attention = [], h2o.window_attention

    def recorded(inputs: ScoringInputs) -> torch.Tensor:
        rows = attention(inputs)
        sizes.append(rows.numel())
        return rows

    monkeypatch.setattr(h2o, "window_attention", recorded)
    monkeypatch.setattr(h2o, "block_elements", lambda _: 2**14)
    layer = random_layer(Shape(2, 3, 8, 32, 4, 1028, 1), 0, torch.float32)
    accumulate(scoring_inputs(layer.prompt_query, layer.key))
    assert len(sizes) > 100
    assert max(sizes) <= 2**14


def test_of_repeated_keys_the_latest_is_the_least_redundant() -> None:
    key = torch.eye(32)[None, torch.arange(24)]
    key[0, [3, 9, 15]] = key[0, 3].clone()
    inputs = scoring_inputs(key[0, :2, None], key)
    repeated = redundancy(similarities(inputs, threshold=0.5), inputs)[0]
    assert repeated[3] > repeated[9] > repeated[15] == repeated[4] == repeated[20]
    assert float(repeated.sum()) == pytest.approx(1)


def test_the_largest_logit_of_a_group_counts_before_the_softmax() -> None:
    key = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]])
    query = torch.tensor([[[5.0, 0.0], [0.0, 5.0]]])
    weights = torch.softmax(torch.tensor([5.0, 5.0, 0.0, 0.0]), dim=0)
    config = EvictionConfig(method="r-kv", kernel_size=1)
    found = importance(scoring_inputs(query, key), config)
    torch.testing.assert_close(found, weights[None, :3])


def test_blocks_of_keys_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer(SMALL, 0)
    inputs = scoring_inputs(layer.query, layer.key)
    whole = similarities(inputs, 0.1)
    monkeypatch.setattr(r_kv, "block_elements", lambda _: 7 * whole.numel())
    torch.testing.assert_close(similarities(inputs, 0.1), whole, atol=1e-12, rtol=0)


@many
@given(seeds, st.integers(2, 50), st.sampled_from((0.0, 0.1, 1.0, 15.0, 1e6)), st.integers(1, 64))
def test_smoothing_is_a_window_with_even_queries_added(
    seed: int, num_tokens: int, lam: float, window: int
) -> None:
    """The mean over `window` queries and `lam * window` that attend to all tokens alike.

    So it is the mass of the weights, and of their order; as `eps`, it is the prior at one strength.
    """
    logits = 8 * torch.randn(3, num_tokens, generator=torch.Generator().manual_seed(seed))
    weights = torch.softmax(logits.double(), dim=-1)
    total = window * weights + lam * window * torch.full_like(weights, 1 / num_tokens)
    torch.testing.assert_close(smoothed(weights, lam), total / (window + lam * window))
    eps = lam / num_tokens
    torch.testing.assert_close(smoothed(weights, lam) * (1 + lam), weights + eps)
