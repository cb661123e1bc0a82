"""Allocation: how many pages of the packed blocks each KV head gets. The sum is always exact.

The heads may be those of one layer, or of all layers that share their pages (layer-major).
"""

from collections.abc import Sequence
from fractions import Fraction
from math import floor, inf

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scopes import Floor, Pyramid

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
    `safeguard` of the even budget is blended in, as in the authors' code, or, with `floor`
    `minimum`, each head's best entries up to it come before all others, as in kvpress. Budgets are
    rounded to whole pages by largest remainder, the lower head first on ties.

    Args:
        scores: `[num_kv_heads, num_tokens]`, `num_tokens >= num_packed * block_size`. Minus
            infinity where a head has no entry, in whole pages; only with `floor` `minimum`.
        num_packed: Packed blocks.
        block_size: Entries per page.
        config: Gives `safeguard` and `floor`.

    Returns:
        Pages per head, `[num_kv_heads]` int64, with sum `num_packed * num_kv_heads`; a head never
        gets more pages than it has tokens to fill.
    """
    even = num_packed * block_size
    parameters = config.of(Floor)
    if parameters.floor == "minimum":
        first = torch.sort(scores, dim=-1, descending=True, stable=True)
        least = int(parameters.safeguard * even)
        # What is not there stays so: a head may have fewer entries than the floor.
        raised = first.values[:, :least].masked_fill(first.values[:, :least] > -inf, inf)
        counts = _counts_of_best(scores.scatter(-1, first.indices[:, :least], raised), even)
        return largest_remainder(counts, block_size)
    counts = _counts_of_best(scores, even)
    budgets = blended_budgets(counts, even, parameters.safeguard)
    return largest_remainder(budgets, SAFEGUARD_UNIT * block_size)


def shared_pages(
    scores: torch.Tensor, num_packed: int, block_size: int, config: EvictionConfig
) -> torch.Tensor:
    """Gives heads pages in proportion to their share of the best entries, without a floor.

    What DefensiveKV's code does: `adaptive_pages` with a safeguard of 0.

    Args:
        scores: `[num_kv_heads, num_tokens]`.
        num_packed: Packed blocks.
        block_size: Entries per page.
        config: Unused.

    Returns:
        Pages per head, `[num_kv_heads]` int64, with sum `num_packed * num_kv_heads`.
    """
    return largest_remainder(_counts_of_best(scores, num_packed * block_size), block_size)


def pyramid_blocks(
    num_packed: int, num_layers: int, num_blocks: int, config: EvictionConfig
) -> list[int]:
    """Shares the packed blocks of all layers out by PyramidKV's arithmetic sequence.

    Budgets fall linearly from the first layer to the last, which gets a `beta`-th of the mean, at
    least one block; the first gets no more than there are, and then the last gets more (arXiv
    2406.02069 and the authors' code). Rounded by largest remainder, the lower layer first.

    Args:
        num_packed: Packed blocks per layer, on average.
        num_layers: Layers that share.
        num_blocks: Blocks before the tail, the most that a layer can fill.
        config: Gives `beta`.

    Returns:
        Blocks per layer, each from 1 to `num_blocks`, with sum `num_packed * num_layers`.
    """
    if num_layers == 1:
        return [num_packed]
    least = max(Fraction(num_packed, config.of(Pyramid).beta), Fraction(1))
    most = min(2 * num_packed - least, Fraction(num_blocks))
    step = 2 * (most - num_packed) / (num_layers - 1)
    quotas = [most - layer * step for layer in range(num_layers)]
    return _round_fractions(quotas)


def _counts_of_best(scores: torch.Tensor, even: int) -> torch.Tensor:
    """How many of the `even * num_heads` best entries are each head's, `[num_heads]` int64."""
    num_kv_heads, num_tokens = scores.shape
    # `topk` breaks ties arbitrarily (all of them to one head, on CPU), so only its threshold is
    # used, and tokens go first. What is no number counts as a tie: the sum stays exact.
    flat = scores.t().flatten()
    threshold = torch.topk(flat, even * num_kv_heads, sorted=False).values.min()
    above = flat > threshold
    ties = ~(above | (flat < threshold))
    best = above | (ties & (ties.cumsum(0) <= even * num_kv_heads - above.sum()))
    return best.view(num_tokens, num_kv_heads).sum(0)


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


def _round_fractions(quotas: Sequence[Fraction]) -> list[int]:
    """The same for plain numbers known on the host; their sum is whole."""
    whole = [floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda index: whole[index] - quotas[index])
    for index in by_remainder[: int(sum(quotas)) - sum(whole)]:
        whole[index] += 1
    return whole
