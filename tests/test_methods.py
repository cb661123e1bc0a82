from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.method_cases import METHOD_CASES, MethodCase, every_method_case, every_pooled_case
from tests.strategies import Layer, Shape, few, frequencies, random_layer, seeds, shapes
from vllm_kvselect.choice import Retention, retain
from vllm_kvselect.config import METHOD_NAMES
from vllm_kvselect.registry import KNOWN_METHODS, METHODS


def run(case: MethodCase, shape: Shape, layer: Layer, layer_index: int = 0) -> Retention:
    return retain(
        [case.inputs(shape, layer, layer_index)],
        shape.num_packed,
        shape.block_size,
        case.config(window=shape.window),
    )


def run_pool(case: MethodCase, shape: Shape, layers: list[Layer]) -> Retention:
    assert KNOWN_METHODS[case.method].pooled
    given = [case.inputs(shape, layer, index) for index, layer in enumerate(layers)]
    return retain(given, shape.num_packed, shape.block_size, case.config(window=shape.window))


def run_oracle(
    case: MethodCase, shape: Shape, layers: list[Layer], first_layer: int = 0
) -> oracle.Retained:
    lists = [
        oracle.LayerInputs(
            *(tensor.tolist() for tensor in (given.query, given.key, given.value)),
            layer.output_projection.tolist(),
            None if layer.sinks is None else layer.sinks.tolist(),
            frequencies(shape.head_size),
            layer.probe.tolist(),
        )
        for layer in layers
        for given in [case.inputs(shape, layer)]
    ]
    config = case.config(window=shape.window)
    packed = (shape.num_packed, shape.block_size)
    return oracle.retain(lists, shape.scale, *packed, config, first_layer)


def check_equal(retention: Retention, expected: oracle.Retained, num_tokens: int) -> None:
    flat = [head * num_tokens + token for head, token in expected.entries]
    assert retention.retained.tolist() == flat
    assert retention.offsets.diff().tolist() == expected.pages
    assert int(retention.offsets[0]) == 0


def check_conserved(retention: Retention, shape: Shape, num_layers: int = 1) -> None:
    """Sums are exact, nothing is retained twice, heads fill their pages."""
    num_heads = num_layers * shape.num_kv_heads
    num_pages = shape.num_packed * num_heads
    assert retention.retained.dtype == retention.offsets.dtype == torch.int64
    assert retention.retained.numel() == num_pages * shape.block_size
    assert int(retention.offsets[-1]) == num_pages
    owners = torch.bincount(retention.retained // shape.num_tokens, minlength=num_heads)
    assert torch.equal(owners, retention.offsets.diff() * shape.block_size)
    assert (retention.retained.diff() > 0).all()
    assert int(retention.retained[0]) >= 0
    assert int(retention.retained[-1]) < num_heads * shape.num_tokens


def test_the_configuration_names_the_methods() -> None:
    assert ("none", *METHODS) == METHOD_NAMES


def test_every_method_is_a_case_of_its_own() -> None:
    assert {case.method for case in METHOD_CASES if not case.values} == {
        name for name, method in KNOWN_METHODS.items() if not method.scorer.replay
    }
    assert len({case.name for case in METHOD_CASES}) == len(METHOD_CASES)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_where_it_comes_from_and_what_it_costs(name: str) -> None:
    method = METHODS[name]
    assert "arXiv" in method.paper or name == "random"
    assert method.summary
    assert method.cost
    assert method.limits


@every_method_case
@few
@given(shape=shapes(max_tokens=64), seed=seeds, with_sinks=st.booleans())
def test_what_is_retained_equals_the_oracle(
    case: MethodCase, shape: Shape, seed: int, with_sinks: bool
) -> None:
    layer = random_layer(shape, seed, with_sinks=with_sinks)
    expected = run_oracle(case, shape, [layer], first_layer=seed % 3)
    check_equal(run(case, shape, layer, seed % 3), expected, shape.num_tokens)


@every_pooled_case
@few
@given(shape=shapes(max_tokens=32), seed=seeds, with_sinks=st.booleans())
def test_what_a_pool_retains_equals_the_oracle(
    case: MethodCase, shape: Shape, seed: int, with_sinks: bool
) -> None:
    layers = [
        random_layer(shape, seed + index, with_sinks=with_sinks) for index in range(2 + seed % 2)
    ]
    retention = run_pool(case, shape, layers)
    check_equal(retention, run_oracle(case, shape, layers), shape.num_tokens)
    check_conserved(retention, shape, len(layers))


def test_a_layer_whose_values_weigh_more_gets_all_but_the_floor() -> None:
    shape = Shape(2, 2, 8, 4, 3, 67, 4)
    light, heavy = (random_layer(shape, 0) for _ in range(2))
    heavy.value.mul_(1000)
    case = MethodCase("layer-thetakv", {"safeguard": 0.25, "lam": 15.0})
    pages = run_pool(case, shape, [light, heavy]).offsets.diff().view(2, 2)
    assert pages.sum(dim=1).tolist() == [2, 14]


@every_method_case
@few
@given(shape=shapes(), seed=seeds)
def test_shapes_never_depend_on_scores(case: MethodCase, shape: Shape, seed: int) -> None:
    check_conserved(run(case, shape, random_layer(shape, seed, torch.bfloat16)), shape)


@every_method_case
def test_entries_of_the_tail_do_not_compete(case: MethodCase) -> None:
    """The tail's tokens are retained anyway, however much the window attends to them."""
    shape = Shape(2, 2, 8, 8, 3, 30, 1)
    assert shape.num_tokens == 24
    layer = random_layer(shape, 0)
    layer.key[:, 24:27] = 10 * layer.query.mean(dim=(0, 1))
    retained = run(case, shape, layer).retained
    assert len(set(retained.tolist())) == 2 * 8
    assert int(retained.max()) < 2 * 24
    if case.method == "streaming-llm":
        sinks = min(case.config().num_first, 8)
        expected = [*range(sinks), *range(24 - (8 - sinks), 24)]
        assert (retained.view(2, 8) % 24).tolist() == [expected] * 2


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].perturbation])
def test_perturbation_needs_the_output_projection(name: str) -> None:
    shape = Shape(1, 1, 8, 4, 1, 13, 1)
    layer, case = random_layer(shape, 0), MethodCase(name)
    given = replace(case.inputs(shape, layer), output_projection=None)
    with pytest.raises(AssertionError):
        retain([given], 1, 4, case.config(window=1))
