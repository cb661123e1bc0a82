"""Heads that hold different numbers of entries, as rounds find them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st

from tests.method_cases import SERVED_CASES, MethodCase
from tests.strategies import Layer, Shape, random_layer, seeds, shapes
from vllm_kvselect.choice import Retention, retain
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.registry import METHODS
from vllm_kvselect.scoring.inputs import ScoringInputs

ROUND_CASES = [case for case in SERVED_CASES if METHODS[case.method].in_rounds]
every_round_case = pytest.mark.parametrize("case", ROUND_CASES, ids=lambda case: case.name)


@dataclass(frozen=True)
class Uneven:
    """Layers whose heads lack some of their first pages.

    Attributes:
        shape: What the fullest head has.
        layers: Tensors; what is absent holds numbers that must not matter, or none.
        num_absent: `[num_layers][num_kv_heads]`, multiples of the block size.
    """

    shape: Shape
    layers: list[Layer]
    num_absent: list[list[int]]


def some_absent(shape: Shape, seed: int) -> torch.Tensor:
    """How many of the first entries each head lacks: none, some, or all before the window."""
    generator = torch.Generator().manual_seed(seed)
    num_scored = shape.num_prompt_tokens - shape.window
    return torch.randint(num_scored + 1, (shape.num_kv_heads,), generator=generator)


@st.composite
def unevens(draw: st.DrawFn, case: MethodCase, dtype: torch.dtype = torch.float64) -> Uneven:
    """Layers for a method, one if it has no pool; what they hold is enough for its budget."""
    method = METHODS[case.method]
    num_layers, is_uniform = 1 + method.pooled, method.allocator == "uniform_pages"
    shape = draw(shapes(max_tokens=64))
    layers = [random_layer(shape, draw(seeds), dtype, with_sinks=True) for _ in range(num_layers)]
    most = shape.tail_start - shape.num_packed if is_uniform else shape.tail_start - 1
    pages = [
        [draw(st.integers(0, most)) for _ in range(shape.num_kv_heads)] for _ in range(num_layers)
    ]
    for heads in pages:
        num_held = sum(shape.tail_start - absent for absent in heads)
        assume(num_held >= shape.num_packed * shape.num_kv_heads)
    absent = [[shape.block_size * count for count in heads] for heads in pages]
    if draw(st.booleans()):
        for layer, of_heads in zip(layers, absent, strict=True):
            for head, count in enumerate(of_heads):
                layer.key[head, :count] = torch.nan
                layer.value[head, :count] = torch.nan
    return Uneven(shape, layers, absent)


def inputs_of(case: MethodCase, uneven: Uneven, index: int) -> ScoringInputs:
    """What the method is given of a layer."""
    absent, layer = uneven.num_absent[index], uneven.layers[index]
    inputs = case.inputs(uneven.shape, layer, index)
    if METHODS[case.method].scorer.keeps_scores:
        moved = numbers(layer, uneven.shape)
        inputs = replace(inputs, query=layer.query, numbers=moved)
    return replace(inputs, num_absent=torch.tensor(absent))


def numbers(layer: Layer, shape: Shape) -> torch.Tensor:
    """Scores that entries might have come with, different ones."""
    return layer.key[:, : shape.num_prompt_tokens].abs().sum(dim=-1)


def retain_uneven(
    case: MethodCase,
    uneven: Uneven,
    kernels: Kernels = REFERENCES,
    prepare: Callable[[ScoringInputs], ScoringInputs] = lambda inputs: inputs,
) -> Retention:
    """What is retained of a layer, or of all together, once they are as the kernels read them."""
    sizes = (uneven.shape.num_packed, uneven.shape.block_size)
    config = case.config(window=uneven.shape.window)
    layers = [prepare(inputs_of(case, uneven, index)) for index in range(len(uneven.layers))]
    return retain(layers if METHODS[case.method].pooled else layers[:1], *sizes, config, kernels)
