"""Heads that hold different numbers of entries, as rounds find them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st

from tests.method_cases import METHOD_CASES, MethodCase
from tests.strategies import Layer, Shape, random_layer, seeds, shapes
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.methods.choice import Retention, retain, retain_pool, score_layer
from vllm_kvselect.methods.registry import METHODS
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.selecting.ranking import Candidates

ROUND_CASES = [case for case in METHOD_CASES if METHODS[case.method].in_rounds]
every_round_case = pytest.mark.parametrize("case", ROUND_CASES, ids=lambda case: case.name)


@dataclass(frozen=True)
class Uneven:
    """Layers whose heads lack some of their first pages.

    Attributes:
        shape: What the fullest head has.
        layers: Tensors; what is absent holds numbers that must not matter.
        num_absent: `[num_layers][num_kv_heads]`, multiples of the block size.
        num_kept: Of the entries after these, those that are retained anyway, likewise; or None.
    """

    shape: Shape
    layers: list[Layer]
    num_absent: list[list[int]]
    num_kept: list[list[int]] | None


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
    return Uneven(shape, layers, absent, draw(st.none() | kept_pages(shape, pages, is_uniform)))


@st.composite
def kept_pages(
    draw: st.DrawFn, shape: Shape, absent: list[list[int]], is_uniform: bool
) -> list[list[int]]:
    """Fewer pages than are retained, of heads that have them; the same for all if they must be."""
    left = 0 if is_uniform else shape.num_packed * sum(map(len, absent)) - 1
    kept = []
    even = draw(st.integers(0, shape.num_packed - 1))
    for heads in absent:
        kept.append([])
        for num_absent in heads:
            count = even if is_uniform else draw(st.integers(0, left))
            count = min(count, shape.tail_start - num_absent)
            left -= 0 if is_uniform else count
            kept[-1].append(count * shape.block_size)
    return kept


def inputs_of(case: MethodCase, uneven: Uneven, index: int) -> ScoringInputs:
    """What the method is given of a layer."""
    absent, kept = torch.tensor(uneven.num_absent[index]), None
    if uneven.num_kept is not None:
        kept = torch.tensor(uneven.num_kept[index])
    layer = uneven.layers[index]
    inputs = case.inputs(uneven.shape, layer, index)
    if METHODS[case.method].cumulative:
        inputs = replace(inputs, query=layer.query, received=received(layer, uneven.shape))
    return replace(inputs, num_absent=absent, num_kept=kept)


def received(layer: Layer, shape: Shape) -> torch.Tensor:
    """Sums of attention that entries might have received, different ones."""
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
    if METHODS[case.method].pooled:
        scored = [score_layer(inputs, config, kernels) for inputs in layers]
        return retain_pool(Candidates.stack(scored), *sizes, config, kernels)
    return retain(layers[0], *sizes, config, kernels)
