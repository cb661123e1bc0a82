"""How well a probe imitates its teacher, on texts that it was not fitted to."""

from collections.abc import Sequence

import torch

_SHARE = 0.25
"""Share of the entries that teacher and probe are asked for."""


class Agreement:
    """Sums over texts, so that only one text's predictions are alive at a time.

    Args:
        num_layers: Layers of the model.
    """

    def __init__(self, num_layers: int) -> None:
        self._sums = torch.zeros(num_layers, 6, dtype=torch.float64)
        self._overlaps: list[float] = []

    def add(self, predicted: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Adds a text.

        Args:
            predicted: What the probe says, `[num_kv_heads, num_tokens]` a layer.
            targets: What it should say, likewise.
        """
        for sums, x, y in zip(self._sums, predicted, targets, strict=True):
            x, y = x.double().flatten().cpu(), y.double().flatten().cpu()
            one = torch.ones_like(x)
            sums += torch.stack([each.sum() for each in (one, x, y, x * x, y * y, x * y)])
        self._overlaps.append(_overlap(predicted, targets))

    @property
    def correlations(self) -> list[float]:
        """Pearson's correlation of prediction and target, over all heads and tokens of a layer."""
        return _correlation(self._sums).tolist()

    @property
    def correlation(self) -> float:
        """The same over all layers."""
        return _correlation(self._sums.sum(dim=0)).item()

    @property
    def overlap(self) -> float:
        """Share of the teacher's best quarter, one over all layers and heads, in the probe's."""
        return sum(self._overlaps) / len(self._overlaps)


def _correlation(sums: torch.Tensor) -> torch.Tensor:
    count, x, y, xx, yy, xy = sums.unbind(dim=-1)
    covariance = count * xy - x * y
    variances = (count * xx - x * x) * (count * yy - y * y)
    return covariance / variances.clamp(min=torch.finfo(sums.dtype).tiny).sqrt()


def _overlap(predicted: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> float:
    x, y = (
        torch.stack([each.flatten() for each in part]).flatten() for part in (predicted, targets)
    )
    count = max(1, round(_SHARE * len(y)))
    found = torch.isin(x.topk(count).indices, y.topk(count).indices)
    return found.double().mean().item()
