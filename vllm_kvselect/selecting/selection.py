"""Selection: which entries each head retains inside its budget, in one stage or two."""

from collections.abc import Sequence
from math import inf

import torch

from vllm_kvselect.scoring.numbers import on_device


def select(scores: torch.Tensor, budgets: torch.Tensor, num_retained: int) -> torch.Tensor:
    """Retains the best-scored entries of every head.

    Equal scores fall to the earlier token, so ties never drop the sinks.

    Args:
        scores: `[num_kv_heads, num_tokens]`.
        budgets: Entries per head, `[num_kv_heads]` int64, none above `num_tokens`.
        num_retained: Their sum, known without reading `budgets` back.

    Returns:
        Flat indices `head * num_tokens + token`, ascending, `[num_retained]` int64.
    """
    mask = _rank(scores) < budgets[:, None]
    # Of a size that is known, so that nothing waits for the device.
    return torch.nonzero_static(mask.flatten(), size=num_retained).squeeze(-1)


def best_mask(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Marks the `counts[head]` best-scored entries of every head, `[num_heads, num_tokens]`."""
    return _rank(scores) < counts[:, None]


def stage_1_counts(budgets: torch.Tensor, alpha: float, num_first: int = 0) -> torch.Tensor:
    """Entries of every head that stage 1 retains, `[num_kv_heads]` int64.

    Args:
        budgets: Entries per head, `[num_kv_heads]` int64.
        alpha: Share of the budget, rounded down.
        num_first: First tokens that are retained in any case: no second stage may drop them.
    """
    counts = (budgets.double() * alpha).to(torch.int64)
    return counts.clamp(min=num_first).minimum(budgets) if num_first else counts


def best_first(scores: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Makes the best scores of every head infinite, before all others.

    Args:
        scores: `[num_segments, num_heads, num_tokens]`; minus infinity, which stays, for what is
            not there.
        counts: How many of each head, by segment.
    """
    of_segments = on_device(counts, scores.device)[:, None, None]
    is_best = (_rank(scores) < of_segments) & (scores > -inf)
    return scores.masked_fill(is_best, inf)


def mass_mask(attention: torch.Tensor, mass: float, most: torch.Tensor | int) -> torch.Tensor:
    """Marks the best entries of every head that it takes to reach a share of its attention.

    Stage 1 of DefensiveKV. What is not among the entries (the window and the rest of the tail) is
    retained anyway and counts as reached.

    Args:
        attention: Mean attention weights, `[..., num_tokens]`; a row sums to at most 1. Minus
            infinity for what is absent.
        mass: Share to reach, 0 to 1.
        most: Largest number of entries per head, one number or `[..., 1]`.

    Returns:
        `[..., num_tokens]` bool.
    """
    ranked = torch.sort(attention.double(), dim=-1, descending=True, stable=True)
    weights = ranked.values.clamp(min=0)
    reached = weights.cumsum(dim=-1)
    before, elsewhere = reached - weights, 1 - reached[..., -1:]
    places = torch.arange(attention.shape[-1], device=attention.device)
    taken = (before + elsewhere < mass) & (places < most)
    return torch.empty_like(taken).scatter_(-1, ranked.indices, taken)


def stage_2_keys(
    scores: torch.Tensor, norms: torch.Tensor, stage_1: torch.Tensor, eps: float
) -> torch.Tensor:
    """What stage 2 ranks by; entries of stage 1 come before all others."""
    return ((scores + eps) * norms).masked_fill_(stage_1, float("inf"))


def _rank(scores: torch.Tensor) -> torch.Tensor:
    """Rank of each entry in its head, best first, the earlier token first on ties."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    ranks = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, ranks)
