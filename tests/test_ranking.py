import pytest
import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.selecting.ranking import Candidates, by_bound, by_defence, by_score


def candidates() -> Candidates:
    scores = torch.tensor([[0.5, 0.25, 0.125], [0.25, 0.25, 0.25]])
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.375, 0.375, 0.375]])
    return Candidates(scores, weights, torch.tensor([[1.0, 3.0, 0.0], [3.0, 1.0, 0.0]]))


def test_by_score_is_the_score() -> None:
    assert torch.equal(
        by_score(candidates(), [1], EvictionConfig(method="adakv-perturb")), candidates().scores
    )


def test_by_bound_smooths_the_weights_and_multiplies() -> None:
    ranking = by_bound(candidates(), [1], EvictionConfig(method="adakv-perturb", lam=1.5))
    weights, norms = candidates().stage_2, candidates().norms
    torch.testing.assert_close(ranking, (weights + 0.5) / 2.5 * norms)


def test_by_defence_normalises_over_the_heads_of_a_layer() -> None:
    ranking = by_defence(candidates(), [1], EvictionConfig(method="adakv-perturb", mass=0.0))
    expected = [[0.125, 0.1875, 0.0], [0.28125, 0.09375, 0.0]]
    torch.testing.assert_close(ranking, torch.tensor(expected))


def test_by_defence_puts_stage_1_first_in_order_of_attention() -> None:
    ranking = by_defence(candidates(), [2], EvictionConfig(method="adakv-perturb", mass=0.9))
    assert ranking[0].tolist() == [2.5, 2.25, 0.0]
    assert ranking[1].tolist() == [2.25, 2.25, 0.0]


def test_stacked_layers_are_ranked_like_each_alone() -> None:
    """Norms are normalised, and stages filled, inside a layer."""
    first = candidates()
    second = Candidates(first.scores.flip(1), first.stage_2.flip(1), first.weights)
    layers = zip(first[:3], second[:3], strict=True)
    stacked = Candidates(*map(torch.stack, layers))
    for ranking in (by_score, by_bound, by_defence):
        ranked = ranking(stacked, [1, 1], EvictionConfig(method="adakv-perturb"))
        for layer, alone in zip(ranked, (first, second), strict=True):
            assert torch.equal(layer, ranking(alone, [1], EvictionConfig(method="adakv-perturb")))


def test_scores_stand_in_for_weights_that_are_not_there() -> None:
    layer = candidates()._replace(weights=None)
    assert layer.stage_2 is layer.scores


def test_norms_are_needed_where_they_count() -> None:
    without = candidates()._replace(norms=None)
    for ranking in (by_bound, by_defence):
        with pytest.raises(AssertionError):
            ranking(without, [1], EvictionConfig(method="adakv-perturb"))
