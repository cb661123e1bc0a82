"""Ranking: what allocation counts, and selection ranks by unless it has stages of its own."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.thetakv import smoothed
from vllm_kvselect.selection import mass_mask


class Candidates(NamedTuple):
    """The entries that compete for packed pages: of one layer, or of layers stacked in front.

    Attributes:
        scores: What stage 1 ranks by, `[..., num_kv_heads, num_tokens]`, not negative.
        weights: What stage 2 multiplies by the norms, of the same shape.
        norms: Projected value norms, of the same shape; None where they are computed once the
            budgets are known, or not at all.
    """

    scores: torch.Tensor
    weights: torch.Tensor
    norms: torch.Tensor | None

    @classmethod
    def stack(cls, layers: Sequence[Self]) -> Self:
        """Stacks layers in order: `[num_layers, num_kv_heads, num_tokens]`."""
        norms = [layer.norms for layer in layers if layer.norms is not None]
        scores = weights = torch.stack([layer.scores for layer in layers])
        if any(layer.weights is not layer.scores for layer in layers):
            weights = torch.stack([layer.weights for layer in layers])
        return cls(scores, weights, torch.stack(norms) if norms else None)

    @classmethod
    def empty(cls, num_layers: int, layer: Self) -> Self:
        """Room for layers like one, `[num_layers, num_kv_heads, num_tokens]`."""
        scores = weights = layer.scores.new_empty(num_layers, *layer.scores.shape)
        if layer.weights is not layer.scores:
            weights = torch.empty_like(scores)
        return cls(scores, weights, None if layer.norms is None else torch.empty_like(scores))

    def of_layer(self, index: int) -> Self:
        """The candidates of one of the stacked layers."""
        scores = weights = self.scores[index]
        if self.weights is not self.scores:
            weights = self.weights[index]
        return type(self)(scores, weights, None if self.norms is None else self.norms[index])


def by_score(candidates: Candidates, even: int, config: EvictionConfig) -> torch.Tensor:
    """Ranks by score alone.

    Args:
        candidates: The competing entries.
        even: Even budget of a head in entries, unused.
        config: Unused; every ranking has this signature.

    Returns:
        `[..., num_kv_heads, num_tokens]`.
    """
    return candidates.scores


def by_bound(candidates: Candidates, even: int, config: EvictionConfig) -> torch.Tensor:
    """Ranks by smoothed attention times norm, an entry's part of the bound (ThetaKV).

    Args:
        candidates: The competing entries, with norms.
        even: Unused.
        config: Gives `lam`.

    Returns:
        `[..., num_kv_heads, num_tokens]`.
    """
    assert candidates.norms is not None
    return smoothed(candidates.weights, config.lam) * candidates.norms


def by_defence(candidates: Candidates, even: int, config: EvictionConfig) -> torch.Tensor:
    """Ranks entries of stage 1 first, then by defensive score times normalised norm (DefensiveKV).

    A token's norms are divided by their sum over the layer's heads. Stage 1 takes a head's best
    entries by mean attention until `mass` of it is reached, at most the even budget; among
    themselves they are ranked by mean attention, since a head may lose some to page rounding.

    Args:
        candidates: Mean attention as scores, defensive scores as weights, with norms.
        even: Even budget of a head in entries.
        config: Gives `mass`.

    Returns:
        `[..., num_kv_heads, num_tokens]`, at least 2 for entries of stage 1, else at most 1.
    """
    norms = candidates.norms
    assert norms is not None
    total = norms.sum(dim=-2, keepdim=True).clamp_(min=torch.finfo(norms.dtype).tiny)
    stage_1 = mass_mask(candidates.scores, config.mass, even)
    products = candidates.weights * (norms / total)
    return torch.where(stage_1, 2 + candidates.scores, products)
