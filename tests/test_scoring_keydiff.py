import pytest
import torch
from hypothesis import given

from tests import oracle
from tests.strategies import Shape, few, random_layer, scoring_inputs, seeds, shapes
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.keydiff import keydiff_scores


@few
@given(shape=shapes(max_tokens=48), seed=seeds)
def test_scores_equal_the_oracle(shape: Shape, seed: int) -> None:
    layer = random_layer(shape, seed)
    scores = keydiff_scores(
        scoring_inputs(layer.query, layer.key), EvictionConfig(method="adakv-perturb")
    )
    expected = oracle.keydiff_scores(layer.key.tolist(), shape.window)
    torch.testing.assert_close(
        scores, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0
    )


def test_the_one_key_that_points_elsewhere_comes_first() -> None:
    key = torch.tensor([3.0, 0.1]).repeat(1, 20, 1)
    key[0, 7] = torch.tensor([0.0, 0.01])
    scores = keydiff_scores(
        scoring_inputs(key[0, :2, None], key), EvictionConfig(method="adakv-perturb")
    )
    assert scores.shape == (1, 18)
    assert int(scores.argmax()) == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_are_float32_and_do_not_depend_on_queries(dtype: torch.dtype) -> None:
    layer = random_layer(Shape(2, 2, 8, 8, 3, 51, 2), 0, dtype)
    first, second = (
        keydiff_scores(scoring_inputs(query, layer.key), EvictionConfig(method="adakv-perturb"))
        for query in (layer.query, -layer.query)
    )
    assert first.dtype == torch.float32
    assert torch.equal(first, second)
    assert (first >= 0).all()
