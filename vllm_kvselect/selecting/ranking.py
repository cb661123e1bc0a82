"""Ranking: what allocation counts, and selection ranks by unless it has stages of its own."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Self

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.norms import Mass, Smoothing
from vllm_kvselect.scoring.inputs import absent_columns
from vllm_kvselect.scoring.numbers import on_device
from vllm_kvselect.scoring.thetakv import smoothed
from vllm_kvselect.selecting.selection import mass_mask


class Candidates(NamedTuple):
    """The entries that compete for packed pages: of one layer, or of several.

    Attributes:
        scores: What stage 1 ranks by, `[..., num_kv_heads, num_tokens]`, not negative.
        weights: What stage 2 multiplies by the norms, of the same shape; None for the scores.
        norms: Projected value norms, of the same shape; None where they are computed once the
            budgets are known, or not at all.
        num_absent: First columns of each head in which nothing competes, `[..., num_kv_heads]`;
            None where every column has an entry.
    """

    scores: torch.Tensor
    weights: torch.Tensor | None = None
    norms: torch.Tensor | None = None
    num_absent: torch.Tensor | None = None

    @classmethod
    def of(cls, parts: Iterable[torch.Tensor | None]) -> Self:
        """Puts the parts together, in their order."""
        scores, weights, norms, num_absent = parts
        assert scores is not None
        return cls(scores, weights, norms, num_absent)

    def of_layers(self, indices: Sequence[int]) -> Self:
        """The candidates of some of the layers."""
        return self.of(None if part is None else part[list(indices)] for part in self)

    def of_entries(self, indices: torch.Tensor) -> Self:
        """The numbers of some entries, `[n]` each, by their places in the flat tensors."""
        return self.of(
            None if part is None else part.flatten()[indices] for part in (*self[:3], None)
        )

    @property
    def stage_2(self) -> torch.Tensor:
        """What stage 2 multiplies by the norms."""
        return self.scores if self.weights is None else self.weights

    def with_first(self, ranking: torch.Tensor, num_first: int) -> torch.Tensor:
        """Puts each head's first entries before all others of a ranking, and absent ones behind."""
        if not num_first:
            return self.without_absent(ranking)
        if self.num_absent is None:
            ranking = ranking.clone()
            ranking[..., :num_first].fill_(float("inf"))
            return ranking
        is_first = absent_columns(self.num_absent + num_first, ranking.shape[-1])
        return self.without_absent(ranking.masked_fill(is_first, float("inf")))

    def without_absent(self, ranking: torch.Tensor) -> torch.Tensor:
        """Puts absent entries behind all others of a ranking, `[..., num_kv_heads, num_tokens]`."""
        if self.num_absent is None:
            return ranking
        is_absent = absent_columns(self.num_absent, ranking.shape[-1])
        return ranking.masked_fill(is_absent, float("-inf"))


def by_score(candidates: Candidates, even: Sequence[int], config: EvictionConfig) -> torch.Tensor:
    """Ranks by score alone."""
    return candidates.scores


def by_product(candidates: Candidates, even: Sequence[int], config: EvictionConfig) -> torch.Tensor:
    """Ranks by score times L2 norm, a layer's norms over their mean.

    Norms grow from layer to layer, as the hidden state does that they are added to. Over their mean
    they tell a layer's entries apart and leave the balance of the layers to the scores. So the L2
    norm does as well as the L1 norm of the perturbation bound, which costs many times as much.
    """
    norms = candidates.norms
    assert norms is not None
    tiny = torch.finfo(norms.dtype).tiny  # an infinite score times no norm would be no number
    mean = norms.mean(dim=(-2, -1), keepdim=True).clamp_(min=tiny)
    return candidates.scores * (norms / mean).clamp_(min=tiny)


def by_bound(candidates: Candidates, even: Sequence[int], config: EvictionConfig) -> torch.Tensor:
    """Ranks by smoothed attention times norm, an entry's part of the bound (ThetaKV)."""
    assert candidates.norms is not None
    attention = smoothed(candidates.stage_2, config.of(Smoothing).lam, candidates.num_absent)
    return attention * candidates.norms


def by_defence(candidates: Candidates, even: Sequence[int], config: EvictionConfig) -> torch.Tensor:
    """Ranks entries of stage 1 first, then by defensive score times normalised norm (DefensiveKV).

    A token's norms are divided by their sum over the layer's heads. Stage 1 takes a head's best
    entries by mean attention until `mass` of it is reached, at most the even budget; among
    themselves they are ranked by mean attention, since a head may lose some to page rounding.
    Scores are mean attention, weights the defensive scores.

    Returns:
        `[..., num_kv_heads, num_tokens]`, at least 2 for entries of stage 1, else at most 1.
    """
    norms = candidates.norms
    assert norms is not None
    total = norms.sum(dim=-2, keepdim=True).clamp_(min=torch.finfo(norms.dtype).tiny)
    attention = candidates.without_absent(candidates.scores)
    most = on_device(even, norms.device).view(-1, *[1] * (norms.ndim - 1))
    stage_1 = mass_mask(attention, config.of(Mass).mass, most)
    products = candidates.stage_2 * (norms / total)
    return torch.where(stage_1, 2 + candidates.scores, products)


Ranking = Callable[[Candidates, Sequence[int], EvictionConfig], torch.Tensor]
"""`(candidates, even, config)` -> what allocation counts, of the candidates' shape."""

RANKINGS: Mapping[str, Ranking] = {
    "score": by_score,
    "product": by_product,
    "bound": by_bound,
    "defence": by_defence,
}
