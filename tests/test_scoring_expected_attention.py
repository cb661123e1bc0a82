from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.strategies import (
    Layer,
    Shape,
    few,
    frequencies,
    random_layer,
    rotation,
    scoring_inputs,
    seeds,
    shapes,
)
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring import expected_attention
from vllm_kvselect.scoring.expected_attention import QueryMoments, expected_attention_scores
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.rotation import Rotation

SHAPE = Shape(2, 3, 8, 8, 3, 51, 2)


def inputs(layer: Layer, scale: float, is_rotated: bool = True) -> ScoringInputs:
    tensors = layer.prompt_query, layer.key, scale, layer.value
    rotated_by = rotation(layer.key.shape[-1]) if is_rotated else None
    return scoring_inputs(*tensors, sinks=layer.sinks, rotated_by=rotated_by)


@few
@given(
    shape=shapes(max_tokens=32),
    seed=seeds,
    num_first=st.sampled_from((0, 1, 4, 20, 1000)),
    future=st.sampled_from((1, 7, 512)),
    eps=st.sampled_from((0.0, 0.02)),
    with_sinks=st.booleans(),
    is_rotated=st.booleans(),
)
def test_scores_equal_the_oracle(
    shape: Shape,
    seed: int,
    num_first: int,
    future: int,
    eps: float,
    with_sinks: bool,
    is_rotated: bool,
) -> None:
    layer = random_layer(shape, seed, with_sinks=with_sinks)
    options = {"keep_first": num_first, "future": future, "expected_eps": eps}
    config = EvictionConfig(method="expected-attention", window=shape.window, **options)
    scores = expected_attention_scores(inputs(layer, shape.scale, is_rotated), config)
    attention = oracle.expected_attention(
        layer.prompt_query.tolist(),
        layer.key.tolist(),
        shape.scale,
        num_first,
        future,
        frequencies(shape.head_size) if is_rotated else [],
        layer.sinks.tolist() if layer.sinks is not None else None,
    )
    value = layer.value.tolist()
    expected = oracle.expected_attention_scores(attention, value, shape.window, eps)
    reference = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(scores, reference, rtol=1e-9, atol=0)


def test_the_closed_form_is_the_mean_over_drawn_queries() -> None:
    """What is published, without the formula: queries are drawn, their exponentials averaged."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(200_000, 1, 4, generator=generator, dtype=torch.float64)
    query = (
        drawn
        @ torch.tensor([[1.0, 0, 0, 0], [0.5, 1, 0, 0], [0, 0, 0.5, 0], [0, 1, 0, 1]])[
            None
        ].double()
        + torch.tensor([1.0, -0.5, 0.0, 2.0]).double()
    )
    key = 0.5 * torch.randn(1, 9, 4, generator=generator, dtype=torch.float64)
    config = EvictionConfig(method="adakv-perturb", keep_first=0)
    found = expected_attention.expected_attention(scoring_inputs(query, key, 0.5), config)
    powers = (0.5 * query[:, 0] @ key[0].T).exp().mean(0)
    torch.testing.assert_close(found[0], powers / powers.sum(), rtol=0.02, atol=0)


def test_a_mean_far_from_the_origin_does_not_cost_the_covariance() -> None:
    generator = torch.Generator().manual_seed(0)
    query = 1000 + torch.randn(1, 4096, 8, generator=generator)
    first, second = (QueryMoments.of(part) for part in query.split([1000, 3096], dim=1))
    expected = torch.cov(query[0].T.double(), correction=0)
    found = first.merged(second).covariance[0].double()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_blocks_of_queries_and_keys_give_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    config, whole = (
        EvictionConfig(method="adakv-perturb", window=SHAPE.window),
        inputs(random_layer(SHAPE, 0), 1.0),
    )
    at_once = expected_attention_scores(whole, config)
    monkeypatch.setattr(expected_attention, "_BLOCK_ELEMENTS", 200)
    in_blocks = expected_attention_scores(whole, config)
    torch.testing.assert_close(in_blocks, at_once, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shift", [1, 300])
def test_scores_do_not_depend_on_where_the_prompt_begins(shift: int) -> None:
    """Queries, keys and what follows them, all at later positions: only distances count."""
    whole, config = (
        inputs(random_layer(SHAPE, 0), SHAPE.scale),
        EvictionConfig(method="adakv-perturb", window=3),
    )
    tables = whole.rotation
    assert tables is not None
    by_shift = Rotation(tables.cos[shift : shift + 1], tables.sin[shift : shift + 1])
    shifted = replace(
        whole,
        query=by_shift.apply(whole.query),
        key=by_shift.apply(whole.key),
        rotation=Rotation(tables.cos[shift:], tables.sin[shift:]),
    )
    expected = expected_attention_scores(whole, config)
    torch.testing.assert_close(
        expected_attention_scores(shifted, config), expected, rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_are_at_least_float32(dtype: torch.dtype) -> None:
    layer, tables = random_layer(SHAPE, 0, dtype), rotation(SHAPE.head_size)
    in_dtype = Rotation(tables.cos.to(dtype), tables.sin.to(dtype))
    given_inputs = replace(inputs(layer, SHAPE.scale), rotation=in_dtype)
    scores = expected_attention_scores(
        given_inputs, EvictionConfig(method="adakv-perturb", window=3)
    )
    assert scores.dtype == torch.float32
    assert (scores >= 0).all()
    exact = expected_attention_scores(
        inputs(random_layer(SHAPE, 0), SHAPE.scale),
        EvictionConfig(method="adakv-perturb", window=3),
    )
    tolerance = 30 * torch.finfo(dtype).eps
    torch.testing.assert_close(scores.double(), exact, rtol=tolerance, atol=0)
