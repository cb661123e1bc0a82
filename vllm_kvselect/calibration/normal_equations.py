"""Ridge regression whose memory does not grow with the number of samples."""

from typing import NamedTuple, Self

import torch


class Spread(NamedTuple):
    """Means and standard deviations of features: weights of different ones become comparable.

    Attributes:
        mean: `[..., num_features, num_heads]`; 0 of the constant.
        deviation: Likewise; 1 of the constant.
    """

    mean: torch.Tensor
    deviation: torch.Tensor

    def in_units(self, weights: torch.Tensor) -> torch.Tensor:
        """Weights of features that have mean 0 and deviation 1, and the constant's last.

        Args:
            weights: Of the features as they are, `[..., num_features, num_heads]`.
        """
        moved = weights * self.deviation
        constant = moved[..., -1:, :] + (weights * self.mean).sum(dim=-2, keepdim=True)
        return torch.cat((moved[..., :-1, :], constant), dim=-2)

    def of_features(self, in_units: torch.Tensor) -> torch.Tensor:
        """The way back: weights of the features as they are; differentiable."""
        weights = in_units / self.deviation
        constant = weights[..., -1:, :] - (weights * self.mean).sum(dim=-2, keepdim=True)
        return torch.cat((weights[..., :-1, :], constant), dim=-2)


class NormalEquations:
    """Sums from which the best linear maps of features to targets follow, one map for each head.

    The last feature is the constant 1. Sums are float64: squares have twice the digits of what is
    squared.
    """

    def __init__(
        self, num_heads: int, num_features: int, device: torch.device | str = "cpu"
    ) -> None:
        def zeros(width: int) -> torch.Tensor:
            return torch.zeros(num_heads, num_features, width, dtype=torch.float64, device=device)

        self._gram, self._moments = zeros(num_features), zeros(1)

    def add(self, features: torch.Tensor, targets: torch.Tensor) -> Self:
        """Adds samples.

        Args:
            features: `[num_heads, num_samples, num_features]`.
            targets: `[num_heads, num_samples]`.
        """
        wide = features.double()
        self._gram.baddbmm_(wide.mT, wide)
        self._moments.baddbmm_(wide.mT, targets.double().unsqueeze(2))
        return self

    def solve(self, ridge: float) -> torch.Tensor:
        """The maps with the least sum of squared errors plus penalty.

        The penalty is the sum of a head's squared weights, that of the constant aside, so that
        targets may have any mean. It keeps the answer unique where features depend on each other,
        as keys and values do: all are maps of the same hidden state.

        Args:
            ridge: Factor of the penalty, in units of the head's mean sum of squares of a feature.
                Positive.

        Returns:
            `[num_features, num_heads]`, float64.
        """
        squares = self._gram.diagonal(dim1=1, dim2=2)
        penalty = (ridge * squares[:, :-1].mean(dim=1, keepdim=True)).expand_as(squares).clone()
        penalty[:, -1] = 0
        factor = torch.linalg.cholesky(self._gram + penalty.diag_embed())
        return torch.cholesky_solve(self._moments, factor).squeeze(2).T

    def spread(self) -> Spread:
        """Means and standard deviations of all features so far, `[num_features, num_heads]`."""
        sums, squares = self._gram[:, -1].T, self._gram.diagonal(dim1=1, dim2=2).T
        mean, count = sums / sums[-1], sums[-1]
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
        mean[-1], deviation[-1] = 0, 1
        # A feature that never changes says what the constant says; its weight stays in its unit.
        return Spread(mean, torch.where(deviation > 0, deviation, torch.ones_like(deviation)))
