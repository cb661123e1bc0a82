"""Ridge regression whose memory does not grow with the number of samples."""

from typing import Self

import torch


class NormalEquations:
    """Sums from which the best linear maps of features to targets follow, one map for each head.

    In float64: squares have twice the digits of what is squared.

    Args:
        num_heads: Heads, each with features and a target of its own.
        num_features: Features, of which the last is the constant 1.
        device: Where the sums are kept.
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

        Returns:
            Itself.
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
