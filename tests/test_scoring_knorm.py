import pytest
import torch
from hypothesis import given

from tests import oracle
from tests.strategies import Shape, few, random_layer, scoring_inputs, seeds, shapes
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.knorm import knorm_scores


@few
@given(shape=shapes(max_tokens=48), seed=seeds)
def test_scores_equal_the_oracle(shape: Shape, seed: int) -> None:
    layer = random_layer(shape, seed)
    scores = knorm_scores(
        scoring_inputs(layer.query, layer.key), EvictionConfig(method="adakv-perturb")
    )
    expected = oracle.knorm_scores(layer.key.tolist(), shape.window)
    torch.testing.assert_close(
        scores, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0
    )


def test_short_keys_come_first_as_published() -> None:
    key = random_layer(Shape(2, 2, 8, 8, 3, 51, 2), 0).key
    key[1, 4] = 0
    scores = knorm_scores(
        scoring_inputs(key[0, :2, None], key), EvictionConfig(method="adakv-perturb")
    )
    published = -key[:, :-2].norm(dim=-1)
    assert torch.equal(scores.argsort(dim=1), published.argsort(dim=1))
    assert float(scores[1, 4]) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_are_float32_even_where_squares_overflow(dtype: torch.dtype) -> None:
    layer = random_layer(Shape(2, 2, 8, 8, 3, 51, 2), 0, dtype)
    scores = knorm_scores(
        scoring_inputs(layer.query, 300 * layer.key), EvictionConfig(method="adakv-perturb")
    )
    assert scores.dtype == torch.float32
    assert (scores > 0).all()
    assert (scores < 1).all()
