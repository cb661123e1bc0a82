"""Allocation: how many pages of the packed blocks each KV head gets. The sum is always exact.

Heads share within a *segment*: a layer of a request, or all layers of a request that share their
pages (layer-major). Segments are given together, and know nothing of each other.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import floor

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scopes import Floor, Pyramid
from vllm_kvselect.scoring.numbers import on_device
from vllm_kvselect.selecting.selection import best_first

SAFEGUARD_UNIT = 2**16
"""The safeguard is rounded to this fraction so that budgets are exact integers."""

ShareOut = Callable[[torch.Tensor, Sequence[int], int, int, int], torch.Tensor]
"""The signature of `share_out`."""


def uniform_pages(
    scores: torch.Tensor, num_packed: Sequence[int], block_size: int, config: EvictionConfig
) -> torch.Tensor:
    """Gives every head of a segment the same number of pages.

    Args:
        scores: `[num_segments, num_heads, num_tokens]`, only its shape is read.
        num_packed: Packed blocks of each segment, of which each holds one page per head.
        block_size: Entries per page, unused.
        config: Unused; every allocator has this signature.

    Returns:
        Pages per head, `[num_segments, num_heads]` int64; the sum of a segment is its
        `num_packed * num_heads`.
    """
    return on_device(num_packed, scores.device)[:, None].expand(scores.shape[:2]).contiguous()


def share_out(
    scores: torch.Tensor, num_packed: Sequence[int], block_size: int, share: int, unit: int
) -> torch.Tensor:
    """Shares pages out by counts of the best entries: what allocators that look at scores do.

    Args:
        scores: `[num_segments, num_heads, num_tokens]`.
        num_packed: Packed blocks of each segment.
        block_size: Entries per page.
        share: What is blended in of the even budget, in `unit`ths of it.
        unit: As above: so budgets are exact integers.

    Returns:
        Pages per head, `[num_segments, num_heads]` int64.
    """
    pages = []
    for each, num in zip(scores, num_packed, strict=True):
        even = num * block_size
        budgets = _counts_of_best(each, even) * (unit - share) + share * even
        pages.append(largest_remainder(budgets, unit * block_size))
    return torch.stack(pages)


def adaptive_pages(
    scores: torch.Tensor,
    num_packed: Sequence[int],
    block_size: int,
    config: EvictionConfig,
    best_first: Callable[[torch.Tensor, Sequence[int]], torch.Tensor] = best_first,
    share_out: ShareOut = share_out,
) -> torch.Tensor:
    """Gives heads pages in proportion to their share of their segment's best entries (AdaKV).

    The top-k over all heads of a segment, k the segment's budget, counts each head's entries (arXiv
    2407.11550, Algorithm 1); equal scores fall to the earlier token, then to the lower head.
    `safeguard` of the even budget is blended in, as in the authors' code, or, with `floor`
    `minimum`, each head's best entries up to it come before all others, as in kvpress. Budgets are
    rounded to whole pages by largest remainder, the lower head first on ties.

    Args:
        scores: `[num_segments, num_heads, num_tokens]`, `num_tokens >= num_packed * block_size`.
            Minus infinity where a head has no entry, in whole pages; only with `floor` `minimum`.
        num_packed: Packed blocks of each segment.
        block_size: Entries per page.
        config: Gives `safeguard` and `floor`.
        best_first: `selection.best_first`, or a twin.
        share_out: The function above, or a twin.

    Returns:
        Pages per head, `[num_segments, num_heads]` int64; the sum of a segment is its
        `num_packed * num_heads`. A head never gets more pages than it has tokens to fill.
    """
    parameters = config.of(Floor)
    if parameters.floor == "minimum":
        # A head may have fewer entries than the floor.
        least = [int(parameters.safeguard * (n * block_size)) for n in num_packed]
        return share_out(best_first(scores, least), num_packed, block_size, 0, 1)
    share = round(parameters.safeguard * SAFEGUARD_UNIT)
    return share_out(scores, num_packed, block_size, share, SAFEGUARD_UNIT)


def shared_pages(
    scores: torch.Tensor,
    num_packed: Sequence[int],
    block_size: int,
    config: EvictionConfig,
    share_out: ShareOut = share_out,
) -> torch.Tensor:
    """Gives heads pages in proportion to their share of the best entries, without a floor.

    What DefensiveKV's code does: `adaptive_pages` with a safeguard of 0; arguments and result as
    there.
    """
    return share_out(scores, num_packed, block_size, 0, 1)


def pyramid_blocks(
    num_packed: int, num_layers: int, num_blocks: int, config: EvictionConfig, least: int = 1
) -> list[int]:
    """Shares the packed blocks of all layers out by PyramidKV's arithmetic sequence.

    Budgets fall linearly from the first layer to the last, which gets a `beta`-th of the mean, at
    least `least` blocks if so many are packed; the first gets no more than the `num_blocks` before
    the tail, and then the last gets more (arXiv 2406.02069 and the authors' code). `num_packed` is
    the mean over the layers. Rounded by largest remainder, the lower layer first.

    Returns:
        Blocks per layer, each from 1 to `num_blocks`, with sum `num_packed * num_layers`.
    """
    if num_layers == 1:
        return [num_packed]
    least = min(least, num_packed)
    last = max(Fraction(num_packed, config.of(Pyramid).beta), Fraction(least))
    most = min(2 * num_packed - last, Fraction(num_blocks))
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
