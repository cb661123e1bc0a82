"""The choice among heads that hold different numbers of entries, as rounds make it."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests import oracle
from tests.method_cases import METHOD_CASES, MethodCase
from tests.strategies import Layer, Shape, few, random_layer, seeds, shapes
from vllm_kvselect.methods.choice import Retention, retain_layer, retain_pool, score_layer
from vllm_kvselect.methods.registry import METHODS
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.selecting.ranking import Candidates

ROUND_CASES = [case for case in METHOD_CASES if METHODS[case.method].in_rounds]


@dataclass(frozen=True)
class Uneven:
    """Layers whose heads lack some of their first pages.

    Attributes:
        shape: What the fullest head has.
        layers: Tensors; what is absent holds numbers that must not matter.
        num_absent: `[num_layers][num_kv_heads]`, multiples of the block size.
    """

    shape: Shape
    layers: list[Layer]
    num_absent: list[list[int]]


@st.composite
def unevens(draw: st.DrawFn, num_layers: int, is_uniform: bool) -> Uneven:
    shape = draw(shapes(max_tokens=64))
    layers = [random_layer(shape, draw(seeds), with_sinks=True) for _ in range(num_layers)]
    most = shape.tail_start - shape.num_packed if is_uniform else shape.tail_start - 1
    pages = [
        [draw(st.integers(0, most)) for _ in range(shape.num_kv_heads)] for _ in range(num_layers)
    ]
    for heads in pages:
        num_held = sum(shape.tail_start - absent for absent in heads)
        assume(num_held >= shape.num_packed * shape.num_kv_heads)
    absent = [[shape.block_size * count for count in heads] for heads in pages]
    return Uneven(shape, layers, absent)


def inputs_of(case: MethodCase, uneven: Uneven, index: int) -> ScoringInputs:
    absent = torch.tensor(uneven.num_absent[index])
    inputs = case.inputs(uneven.shape, uneven.layers[index], index)
    return replace(inputs, num_absent=absent)


def run(case: MethodCase, uneven: Uneven) -> Retention:
    shape, config = uneven.shape, case.config(window=uneven.shape.window)
    layers = [
        score_layer(inputs_of(case, uneven, index), config) for index in range(len(uneven.layers))
    ]
    sizes = (shape.num_packed, shape.block_size)
    if METHODS[case.method].pooled:
        return retain_pool(Candidates.stack(layers), *sizes, config)
    return retain_layer(layers[0], None, None, *sizes, config)


def run_oracle(case: MethodCase, uneven: Uneven) -> oracle.Retained:
    shape, config = uneven.shape, case.config(window=uneven.shape.window)
    packed = (shape.num_packed, shape.block_size)
    heads = [
        [alone(layer, shape, head, absent) for head, absent in enumerate(of_heads)]
        for layer, of_heads in zip(uneven.layers, uneven.num_absent, strict=True)
    ]
    return oracle.retain_uneven(heads, shape.num_tokens, shape.scale, *packed, config)


def alone(layer: Layer, shape: Shape, head: int, num_absent: int) -> oracle.LayerInputs:
    """A head with the entries that it has."""
    queries = slice(head * shape.group, (head + 1) * shape.group)
    assert layer.sinks is not None
    return oracle.LayerInputs(
        layer.query[:, queries].tolist(),
        layer.key[head : head + 1, num_absent : shape.num_prompt_tokens].tolist(),
        layer.value[head : head + 1, num_absent : shape.num_tokens].tolist(),
        layer.output_projection[head : head + 1].tolist(),
        layer.sinks[queries].tolist(),
    )


@pytest.mark.parametrize("case", ROUND_CASES, ids=lambda case: case.name)
@few
@given(data=st.data())
def test_heads_of_different_lengths_retain_what_the_oracle_says(
    case: MethodCase, data: st.DataObject
) -> None:
    method = METHODS[case.method]
    is_uniform = method.allocator == "uniform_pages"
    uneven = data.draw(unevens(2 if method.pooled else 1, is_uniform))
    retention, expected = run(case, uneven), run_oracle(case, uneven)
    num_tokens = uneven.shape.num_tokens
    assert retention.retained.tolist() == [h * num_tokens + t for h, t in expected.entries]
    assert retention.offsets.diff().tolist() == expected.pages
    # What is absent is never retained.
    absent = torch.tensor(uneven.num_absent).flatten()
    head, token = retention.retained // num_tokens, retention.retained % num_tokens
    assert (token >= absent[head]).all()
