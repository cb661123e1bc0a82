import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.strategies import kv_heads, many, scoring_inputs
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.at_random import random_scores


def scores(num_kv_heads: int, num_scored: int, seed: int = 0, layer: int = 0) -> torch.Tensor:
    query, key = torch.empty(4, num_kv_heads, 8), torch.empty(num_kv_heads, num_scored + 4, 8)
    return random_scores(
        scoring_inputs(query, key, layer_index=layer),
        EvictionConfig(method="adakv-perturb", seed=seed),
    )


@many
@given(kv_heads, st.integers(1, 60), st.integers(0, 2**32 - 1), st.integers(0, 200))
def test_scores_equal_the_oracle(num_heads: int, num_scored: int, seed: int, layer: int) -> None:
    actual = scores(num_heads, num_scored, seed, layer)
    assert actual.dtype == torch.float32
    expected = oracle.random_scores(seed, layer, num_heads, num_scored)
    assert (actual * 2**24).tolist() == expected


def test_a_position_keeps_its_score_in_a_longer_prompt() -> None:
    assert torch.equal(scores(2, 100, 1, 3), scores(2, 500, 1, 3)[:, :100])


@pytest.mark.parametrize("other", [(1, 0), (0, 1)], ids=["seed", "layer"])
def test_seeds_layers_and_heads_draw_independently(other: tuple[int, int]) -> None:
    """Of 10,000 entries half lie in both upper halves by chance: 2,500 +- 4 x 43."""
    first, second = scores(2, 10_000), scores(2, 10_000, *other)
    for a, b in [(first[0], second[0]), (first[0], first[1]), (first[1], second[0])]:
        both = int(((a > 0.5) & (b > 0.5)).sum())
        assert abs(both - 2500) < 175


def test_scores_are_spread_evenly() -> None:
    """Each tenth of [0, 1) holds a tenth of 100,000 scores: 10,000 +- 5 x 95."""
    histogram = torch.histc(scores(1, 100_000), bins=10, min=0, max=1)
    assert (histogram - 10_000).abs().max() < 475
