"""Against loops in float64 from the paper's equations."""

from math import fsum, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from papers.quantities import (
    distance,
    following_attention,
    head_outputs,
    mass,
    projected_norms,
    retained_attention,
    theta,
)

from tests import oracle
from tests.strategies import few
from vllm_kvselect.offline.capture import Layer
from vllm_kvselect.scoring.value_norms import OutputProjection

HEAD_SIZE, HIDDEN_SIZE = 4, 6


@st.composite
def layers(draw: st.DrawFn) -> tuple[Layer, torch.Tensor]:
    """A layer and what is retained of its prompt; something follows the prompt."""
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_prompt_tokens, num_following = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    num_tokens = num_prompt_tokens + num_following
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight = normal(num_kv_heads, HEAD_SIZE, group, HIDDEN_SIZE)
    layer = Layer(
        query=2 * normal(num_tokens, num_kv_heads * group, HEAD_SIZE),
        key=normal(num_kv_heads, num_tokens, HEAD_SIZE),
        value=normal(num_kv_heads, num_tokens, HEAD_SIZE),
        scale=draw(st.sampled_from((0.25, 1.0))),
        projection=OutputProjection.of(weight),
    )
    share = draw(st.sampled_from((0.0, 0.3, 0.7, 1.0)))
    drawn = torch.rand(num_kv_heads, num_prompt_tokens, generator=generator)
    return layer, drawn < share


def attention(layer: Layer, head: int, position: int) -> list[float]:
    """`A` of one query head and token, over the tokens up to its own."""
    key = layer.key[head // (layer.query.shape[1] // len(layer.key)), : position + 1].tolist()
    query = layer.query[position, head].tolist()
    return oracle.softmax([layer.scale * oracle.dot(query, vector) for vector in key])


def projected(layer: Layer, head: int) -> list[list[float]]:
    """`V W_O` of every token, for one query head."""
    group = layer.query.shape[1] // len(layer.key)
    projection = layer.output_projection.weight[head // group, :, head % group].t().tolist()
    return [
        [oracle.dot(value, column) for column in projection]
        for value in layer.value[head // group].tolist()
    ]


def output(weights: list[float], values: list[list[float]]) -> list[float]:
    pairs = list(zip(weights, values[: len(weights)], strict=True))
    return [fsum(a * v[c] for a, v in pairs) for c in range(HIDDEN_SIZE)]


@few
@given(layers())
def test_quantities_equal_the_papers_equations(drawn: tuple[Layer, torch.Tensor]) -> None:
    layer, retained = drawn
    num_prompt_tokens = retained.shape[1]
    weights = following_attention(layer, num_prompt_tokens)
    kept = retained_attention(weights, retained)
    full, dropped = head_outputs(layer, weights), head_outputs(layer, kept)
    bounds = theta(weights, kept, projected_norms(layer, torch.float64))
    group = layer.query.shape[1] // len(layer.key)
    for head in range(layer.query.shape[1]):
        values = projected(layer, head)
        norms = [fsum(map(abs, value)) for value in values]
        marks = [*retained[head // group].tolist(), *[True] * layer.query.shape[0]]
        for index in range(weights.shape[1]):
            a = attention(layer, head, num_prompt_tokens + index)
            na = [weight if mark else 0.0 for weight, mark in zip(a, marks, strict=False)]
            total = fsum(na)
            o = output(a, values)
            o_dropped = output([weight / total for weight in na], values)
            c = fsum(x * norm for x, norm in zip(a, norms, strict=False))
            t = c - (2 - 1 / total) * fsum(x * norm for x, norm in zip(na, norms, strict=False))
            differences = [x - y for x, y in zip(o, o_dropped, strict=True)]
            found = {
                "mass": mass(kept)[head, index],
                "l1": distance(full, dropped)[head, index],
                "l2": distance(full, dropped, "l2")[head, index],
                "cosine": distance(full, dropped, "cosine")[head, index],
                "theta": bounds[head, index],
            }
            lengths = sqrt(fsum(x * x for x in o)) * sqrt(fsum(y * y for y in o_dropped))
            expected = {
                "mass": total,
                "l1": fsum(map(abs, differences)),
                "l2": sqrt(fsum(x * x for x in differences)),
                "cosine": 1 - oracle.dot(o, o_dropped) / lengths,
                "theta": t,
            }
            assert {key: value.item() for key, value in found.items()} == pytest.approx(
                expected, rel=1e-9, abs=1e-12
            )


def test_inputs_are_left_as_they_were() -> None:
    weights = torch.full((2, 1, 4), 0.25)
    retained_attention(weights, torch.zeros(1, 3, dtype=torch.bool))
    assert weights.eq(0.25).all()
