import pytest
import torch
from hypothesis import given

from tests import oracle
from tests.strategies import Shape, few, random_layer, scoring_inputs, seeds, shapes
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.defensivekv import defensive_scores, mean_attention
from vllm_kvselect.scoring.snapkv import snapkv_scores


@pytest.mark.parametrize("pooling", ["max", "mean"])
@pytest.mark.parametrize("kernel_size", [1, 5])
@few
@given(shape=shapes(max_tokens=48), seed=seeds)
def test_scores_equal_the_oracle(pooling: str, kernel_size: int, shape: Shape, seed: int) -> None:
    layer = random_layer(shape, seed)
    config = EvictionConfig.parse(
        {"method": "adakv-perturb", "pooling": pooling, "kernel_size": kernel_size}
    )
    scores = defensive_scores(scoring_inputs(layer.query, layer.key, shape.scale), config)
    lists = layer.query.tolist(), layer.key.tolist()
    expected = oracle.defensive_scores(*lists, shape.scale, kernel_size, pooling)
    reference = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(scores, reference, rtol=1e-12, atol=0)


@few
@given(shape=shapes(max_tokens=48), seed=seeds)
def test_the_worst_case_is_never_below_the_mean(shape: Shape, seed: int) -> None:
    layer, config = random_layer(shape, seed), EvictionConfig(method="adakv-perturb")
    worst = defensive_scores(scoring_inputs(layer.query, layer.key, shape.scale), config)
    assert (
        worst >= snapkv_scores(scoring_inputs(layer.query, layer.key, shape.scale), config)
    ).all()
    assert (worst <= 1).all()


@few
@given(shape=shapes(max_tokens=48), seed=seeds)
def test_mean_attention_is_snapkv_without_pooling(shape: Shape, seed: int) -> None:
    layer = random_layer(shape, seed)
    attention = mean_attention(
        scoring_inputs(layer.query, layer.key, shape.scale), EvictionConfig(method="adakv-perturb")
    )
    config = EvictionConfig(method="adakv-perturb", kernel_size=1)
    assert torch.equal(
        attention, snapkv_scores(scoring_inputs(layer.query, layer.key, shape.scale), config)
    )


def test_one_query_that_needs_a_token_is_enough() -> None:
    """The mean would drop a token that one of 16 queries attends to fully."""
    query = torch.zeros(16, 1, 8, dtype=torch.float64)
    query[3, 0, 0] = 50.0
    key = torch.zeros(1, 80, 8, dtype=torch.float64)
    key[0, 20, 0] = 1.0
    config = EvictionConfig(method="adakv-perturb", kernel_size=1)
    assert float(defensive_scores(scoring_inputs(query, key, 1.0), config)[0, 20]) > 0.999
    assert float(snapkv_scores(scoring_inputs(query, key, 1.0), config)[0, 20]) < 0.1


def test_rows_without_any_mass_do_not_become_nan() -> None:
    """Attention that underflows to zero everywhere before the window."""
    query = torch.full((1, 1, 8), 100.0)
    key = torch.zeros(1, 20, 8)
    key[0, 19] = 100.0
    config = EvictionConfig(method="adakv-perturb", pooling="mean")
    assert torch.equal(
        defensive_scores(scoring_inputs(query, key, 1.0), config), torch.zeros(1, 19)
    )
