"""CritiPrefill (Lv et al., arXiv 2409.12490): which blocks of keys a segment of queries reads.

Adjacent queries attend to similar keys. So a segment of queries and a block of keys each stand for
their tokens by the largest and the smallest value in every channel, and the product of these tells
how critical the block is for the segment, without a score for any pair of tokens.
"""

from typing import NamedTuple

import torch


class Extremes(NamedTuple):
    """The largest and the smallest value in every channel, over groups of neighbouring tokens.

    Attributes:
        largest: `[num_heads, num_groups, head_size]`.
        smallest: Likewise.
    """

    largest: torch.Tensor
    smallest: torch.Tensor


def extremes(vectors: torch.Tensor, size: int) -> Extremes:
    """The extremes of groups of `size` tokens.

    Args:
        vectors: Queries or keys with their positions applied, `[num_heads, num_tokens, head_size]`;
            `num_tokens` is a multiple of `size`.
        size: Tokens of a group.

    Returns:
        The extremes, of the dtype of `vectors`: they are values of it.
    """
    num_heads, _, head_size = vectors.shape
    groups = vectors.reshape(num_heads, -1, size, head_size)
    return Extremes(groups.amax(dim=2), groups.amin(dim=2))


def criticality(
    queries: Extremes, keys: Extremes, scale: float, num_before: torch.Tensor
) -> torch.Tensor:
    """Estimates what share of a segment's attention goes to each block before it.

    A segment's product with a block is the mean over its two representative queries, and the larger
    one of the block's two representative keys; then come the mean over the heads of a query group
    and a softmax over blocks. The authors' code has no `scale`: its is 1.

    Args:
        queries: Extremes of the segments, `[num_heads, num_segments, head_size]`.
        keys: Extremes of the blocks, `[num_kv_heads, num_blocks, head_size]`.
        scale: Factor of the products.
        num_before: Blocks before each segment, at least 1, `[num_segments]` int64.

    Returns:
        `[num_segments, num_kv_heads, num_blocks]` float32; 0 for blocks that are not before it.
    """
    num_kv_heads, num_blocks, _ = keys.largest.shape
    middle = middle_of(queries, num_kv_heads)
    largest, smallest = (part.float().mT.unsqueeze(1) for part in keys)
    products = torch.maximum(middle @ largest, middle @ smallest)
    logits = (products.mean(dim=1) * scale).transpose(0, 1)
    blocks = torch.arange(num_blocks, device=logits.device)
    is_before = blocks < num_before[:, None, None]
    return logits.masked_fill(~is_before, -torch.inf).softmax(dim=-1)


def middle_of(queries: Extremes, num_kv_heads: int) -> torch.Tensor:
    """The middle between the extremes of segments of queries.

    The mean of the products of two queries with the same key is the product with their mean.

    Returns:
        `[num_kv_heads, group, num_segments, head_size]` float32.
    """
    middle = (queries.largest.float() + queries.smallest.float()) / 2
    return middle.reshape(num_kv_heads, -1, *middle.shape[1:])


def fused(current: torch.Tensor, previous: torch.Tensor | None, weight: float) -> torch.Tensor:
    """Smooths criticality over layers, which agree on much of it; `weight` is of those before."""
    return current if previous is None else previous * weight + current * (1 - weight)
