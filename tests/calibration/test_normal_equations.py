import pytest
import torch

from vllm_kvselect.calibration.normal_equations import NormalEquations

NUM_HEADS, NUM_SAMPLES, NUM_FEATURES = 3, 200, 12


@pytest.fixture
def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Features of unlike sizes, some of them sums of others; targets far from zero."""
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    features = normal(NUM_HEADS, NUM_SAMPLES, NUM_FEATURES)
    features *= torch.logspace(-2, 2, NUM_FEATURES)
    features[0] *= 10
    features[..., 5] = features[..., 3] + features[..., 4]
    features[..., -1] = 1
    truth, noise = normal(NUM_HEADS, NUM_FEATURES, 1), normal(NUM_HEADS, NUM_SAMPLES)
    return features, (features @ truth).squeeze(2) + noise - 40


def solved(samples: tuple[torch.Tensor, torch.Tensor], ridge: float, step: int) -> torch.Tensor:
    equations = NormalEquations(NUM_HEADS, NUM_FEATURES)
    for features, targets in zip(*(part.split(step, dim=1) for part in samples), strict=True):
        equations.add(features, targets)
    return equations.solve(ridge)


@pytest.mark.parametrize("ridge", [1e-8, 1e-3, 1.0])
def test_each_heads_solution_is_that_of_least_squares_on_all_its_data(
    samples: tuple[torch.Tensor, torch.Tensor], ridge: float
) -> None:
    found = solved(samples, ridge, 50)
    assert found.shape == (NUM_FEATURES, NUM_HEADS)
    for head, (features, targets) in enumerate(zip(*samples, strict=True)):
        # The penalty as further samples: one for each weight but the constant's, whose target is 0.
        size = (ridge * features[:, :-1].square().sum(dim=0).mean()).sqrt()
        penalty = torch.eye(NUM_FEATURES, dtype=torch.float64)[:-1] * size
        more = torch.cat((features, penalty))
        zeros = torch.zeros(NUM_FEATURES - 1, dtype=torch.float64)
        expected = torch.linalg.lstsq(
            more, torch.cat((targets, zeros))[:, None], driver="gelsd"
        ).solution[:, 0]
        torch.testing.assert_close(found[:, head], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("step", [1, 7, NUM_SAMPLES])
def test_other_chunks_change_nothing(samples: tuple[torch.Tensor, torch.Tensor], step: int) -> None:
    expected = solved(samples, 1e-3, 50)
    torch.testing.assert_close(solved(samples, 1e-3, step), expected, rtol=1e-9, atol=1e-12)


def test_the_mean_of_the_targets_is_not_penalised(
    samples: tuple[torch.Tensor, torch.Tensor],
) -> None:
    features, targets = samples
    weights = solved((features, targets), 1e6, 50)
    torch.testing.assert_close(weights[-1], targets.mean(dim=1), rtol=1e-2, atol=0.0)


def test_sums_are_wide_whatever_the_samples_are(samples: tuple[torch.Tensor, torch.Tensor]) -> None:
    features, targets = (part.float() for part in samples)
    found = solved((features, targets), 1e-3, 50)
    expected = solved((features.double(), targets.double()), 1e-3, 50)
    assert torch.equal(found, expected)
