import pytest
import torch

from vllm_kvselect.calibration.gates import log_gates

SHAPE = (2, 3, 20)


@pytest.fixture(params=[0.1, 1.0, 30.0])
def scores(request: pytest.FixtureRequest) -> torch.Tensor:
    """Logarithms close together, as usual, and far apart; some of them equal."""
    generator = torch.Generator().manual_seed(0)
    scores = request.param * torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    scores[0, 0, :5] = scores[1, 1, 7]
    return scores


@pytest.mark.parametrize("share", [0.5, 0.25, 1 / 32])
@pytest.mark.parametrize("softness", [1.0, 0.15])
def test_gates_sum_up_to_the_budget(scores: torch.Tensor, share: float, softness: float) -> None:
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        gates = log_gates(scores.to(dtype), share, softness).exp()
        assert gates.sum().item() == pytest.approx(share * scores.numel(), rel=tolerance)


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_gates_and_their_gradient_are_those_of_one_common_threshold(
    scores: torch.Tensor, share: float
) -> None:
    softness = 0.3
    found = log_gates(scores, share, softness)
    odds = scores / softness - (found - (-found.expm1()).log())
    open_enough = (found > -30) & (found < -1e-9)  # beyond, odds cannot be told from a logarithm
    assert open_enough.sum() > 1
    thresholds = odds[open_enough]
    torch.testing.assert_close(thresholds, thresholds[:1].expand_as(thresholds))
    free = scores.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda each: log_gates(each, share, softness), (free,))


def test_hard_gates_are_the_best_entries() -> None:
    scores = torch.randperm(400, generator=torch.Generator().manual_seed(1)).double().view(4, 100)
    gates = log_gates(scores, 0.25, softness=0.01).exp()
    assert torch.equal(gates.flatten().topk(100).indices.sort().values, _best(scores, 100))
    assert gates.round().sum() == 100


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    return torch.tensor(
        sorted(sorted(range(scores.numel()), key=scores.flatten().tolist().__getitem__)[-count:])
    )


def test_a_common_factor_of_all_scores_changes_nothing(scores: torch.Tensor) -> None:
    """They are logarithms; only what competes is compared."""
    torch.testing.assert_close(
        log_gates(scores + 7.5, 0.25, 0.5), log_gates(scores, 0.25, 0.5), rtol=1e-7, atol=1e-9
    )
