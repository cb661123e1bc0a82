import pytest
import torch
from hypothesis import given

from tests import oracle
from tests.method_cases import METHOD_CASES, MethodCase, every_method_case
from tests.strategies import Shape, few, random_layer, seeds, shapes
from vllm_kvselect.config import METHOD_NAMES
from vllm_kvselect.methods import METHODS, Retention, retain
from vllm_kvselect.scoring.streaming_llm import streaming_llm_scores
from vllm_kvselect.scoring.value_norms import OutputProjection


def run(case: MethodCase, shape: Shape, seed: int, dtype: torch.dtype) -> Retention:
    layer = random_layer(shape, seed, dtype)
    return retain(
        layer.query,
        layer.key,
        layer.value[:, : shape.num_tokens],
        OutputProjection.of(layer.output_projection) if METHODS[case.method].perturbation else None,
        shape.scale,
        shape.num_packed,
        shape.block_size,
        case.config(window=shape.window),
    )


def test_the_configuration_names_the_methods() -> None:
    assert ("none", *METHODS) == METHOD_NAMES


def test_every_method_is_a_case_of_its_own() -> None:
    assert [case.method for case in METHOD_CASES if not case.values] == list(METHODS)
    assert len({case.name for case in METHOD_CASES}) == len(METHOD_CASES)


def test_every_method_says_where_it_comes_from() -> None:
    for method in METHODS.values():
        assert "arXiv" in method.paper
        assert method.summary


@every_method_case
@few
@given(shape=shapes(), seed=seeds)
def test_what_is_retained_equals_the_oracle(case: MethodCase, shape: Shape, seed: int) -> None:
    layer = random_layer(shape, seed)
    expected = oracle.retain(
        layer.query.tolist(),
        layer.key.tolist(),
        layer.value[:, : shape.num_tokens].tolist(),
        layer.output_projection.tolist(),
        shape.scale,
        shape.num_packed,
        shape.block_size,
        case.config(window=shape.window),
    )
    retention = run(case, shape, seed, torch.float64)
    flat = [head * shape.num_tokens + token for head, token in expected.entries]
    assert retention.retained.tolist() == flat
    assert retention.offsets.diff().tolist() == expected.pages
    assert int(retention.offsets[0]) == 0


@every_method_case
@few
@given(shape=shapes(), seed=seeds)
def test_shapes_never_depend_on_scores(case: MethodCase, shape: Shape, seed: int) -> None:
    retention = run(case, shape, seed, torch.bfloat16)
    num_pages = shape.num_packed * shape.num_kv_heads
    assert retention.retained.dtype == retention.offsets.dtype == torch.int64
    assert retention.retained.numel() == num_pages * shape.block_size
    assert int(retention.offsets[-1]) == num_pages
    owners = torch.bincount(retention.retained // shape.num_tokens, minlength=shape.num_kv_heads)
    assert torch.equal(owners, retention.offsets.diff() * shape.block_size)
    assert (retention.retained.diff() > 0).all()
    assert int(retention.retained[0]) >= 0
    assert int(retention.retained[-1]) < shape.num_kv_heads * shape.num_tokens


@every_method_case
def test_entries_of_the_tail_do_not_compete(case: MethodCase) -> None:
    """The tail's tokens are retained anyway, however much the window attends to them."""
    shape = Shape(2, 2, 8, 8, 3, 30, 1)
    assert shape.num_tokens == 24
    layer = random_layer(shape, 0)
    layer.key[:, 24:27] = 10 * layer.query.mean(dim=(0, 1))
    config = case.config(window=shape.window)
    arguments = (OutputProjection.of(layer.output_projection), shape.scale, 1, 8, config)
    retention = retain(layer.query, layer.key, layer.value[:, :24], *arguments)
    retained = retention.retained.view(-1)
    assert len(set(retained.tolist())) == 2 * 8
    assert int((retained % 24).max()) < 24
    if METHODS[case.method].scorer is streaming_llm_scores:
        sinks = min(config.num_sinks, 8)
        expected = [*range(sinks), *range(24 - (8 - sinks), 24)]
        assert (retained.view(2, 8) % 24).tolist() == [expected] * 2


@pytest.mark.parametrize("num_bad", [1, 5])
@every_method_case
def test_a_broken_model_does_not_break_the_bookkeeping(case: MethodCase, num_bad: int) -> None:
    shape = Shape(3, 2, 8, 8, 3, 51, 2)
    layer = random_layer(shape, 0)
    layer.key[1, 7 : 7 + num_bad], layer.value[2, 3 : 3 + num_bad] = torch.nan, torch.nan
    config = case.config(window=shape.window)
    value = layer.value[:, : shape.num_tokens]
    arguments = (OutputProjection.of(layer.output_projection), shape.scale, 2, 8, config)
    retention = retain(layer.query, layer.key, value, *arguments)
    assert int(retention.offsets[-1]) == 6
    assert len(set(retention.retained.tolist())) == 48
    assert int(retention.retained.min()) >= 0
    assert int(retention.retained.max()) < 3 * shape.num_tokens


def test_perturbation_needs_the_output_projection() -> None:
    shape = Shape(1, 1, 8, 4, 1, 13, 1)
    layer = random_layer(shape, 0)
    config = MethodCase("snapkv-perturb").config(window=1)
    with pytest.raises(AssertionError):
        retain(layer.query, layer.key, layer.value[:, :12], None, 1.0, 1, 4, config)
