"""Allocation: how many pages of the packed blocks each KV head gets. The sum is always exact."""

import torch

from vllm_kvselect.config import EvictionConfig

SAFEGUARD_UNIT = 2**16
"""The safeguard is rounded to this fraction so that budgets are exact integers."""


def uniform_pages(
    scores: torch.Tensor, num_packed: int, block_size: int, config: EvictionConfig
) -> torch.Tensor:
    """Gives every head the same number of pages.

    Args:
        scores: `[num_kv_heads, num_tokens]`, only its shape is read.
        num_packed: Packed blocks; each holds one page per head.
        block_size: Entries per page, unused.
        config: Unused; every allocator has this signature.

    Returns:
        Pages per head, `[num_kv_heads]` int64, with sum `num_packed * num_kv_heads`.
    """
    return torch.full((scores.shape[0],), num_packed, dtype=torch.int64, device=scores.device)


def adaptive_pages(
    scores: torch.Tensor, num_packed: int, block_size: int, config: EvictionConfig
) -> torch.Tensor:
    """Gives heads pages in proportion to their share of the layer's best entries (AdaKV).

    The global top-k over all heads, k the layer's budget, counts each head's entries (arXiv
    2407.11550, Algorithm 1); equal scores fall to the earlier token, then to the lower head.
    `safeguard` of the even budget is blended in, as in the authors' code. Budgets are rounded to
    whole pages by largest remainder, the lower head first on ties.

    Args:
        scores: `[num_kv_heads, num_tokens]`, `num_tokens >= num_packed * block_size`.
        num_packed: Packed blocks.
        block_size: Entries per page.
        config: Gives `safeguard`.

    Returns:
        Pages per head, `[num_kv_heads]` int64, with sum `num_packed * num_kv_heads`; a head never
        gets more pages than it has tokens to fill.
    """
    num_kv_heads, num_tokens = scores.shape
    even = num_packed * block_size
    # `topk` breaks ties arbitrarily (all of them to one head, on CPU), so only its threshold is
    # used, and tokens go first. What is no number counts as a tie: the sum stays exact.
    flat = scores.t().flatten()
    threshold = torch.topk(flat, even * num_kv_heads, sorted=False).values.min()
    above = flat > threshold
    ties = ~(above | (flat < threshold))
    best = above | (ties & (ties.cumsum(0) <= even * num_kv_heads - above.sum()))
    counts = best.view(num_tokens, num_kv_heads).sum(0)
    return largest_remainder(
        blended_budgets(counts, even, config.safeguard), SAFEGUARD_UNIT * block_size
    )


def blended_budgets(counts: torch.Tensor, even: int, safeguard: float) -> torch.Tensor:
    """Blends the even budget into counts of entries: exact, in `SAFEGUARD_UNIT`ths of an entry."""
    share = round(safeguard * SAFEGUARD_UNIT)
    return counts * (SAFEGUARD_UNIT - share) + share * even


def largest_remainder(amounts: torch.Tensor, unit: int) -> torch.Tensor:
    """Rounds integers to multiples of `unit`, keeping the sum, without a host synchronisation."""
    whole = amounts // unit
    remainder = amounts - whole * unit
    num_left = remainder.sum() // unit
    order = torch.argsort(remainder, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device)
    return whole + (rank < num_left)
