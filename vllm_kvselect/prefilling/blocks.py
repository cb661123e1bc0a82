"""Which blocks a segment reads, by their criticality."""

from typing import NamedTuple

import torch


class ChosenBlocks(NamedTuple):
    """The blocks that each segment reads with each KV head.

    Attributes:
        indices: Their indices in order, `[num_segments, num_kv_heads, most]` int64; past a pair's
            own number anything.
        counts: How many they are, `[num_segments, num_kv_heads]` int64.
    """

    indices: torch.Tensor
    counts: torch.Tensor


def most_critical(criticality: torch.Tensor, num_before: torch.Tensor, count: int) -> ChosenBlocks:
    """The same number of blocks for every segment: the most critical ones.

    Args:
        criticality: `[num_segments, num_kv_heads, num_blocks]`, at least 0.
        num_before: Blocks before each segment, `[num_segments]` int64.
        count: Blocks to read; fewer where fewer are before the segment.
    """
    num_segments, num_kv_heads, num_blocks = criticality.shape
    # A block behind the segment must lose even against one whose share has become 0.
    is_behind = torch.arange(num_blocks, device=criticality.device) >= num_before[:, None, None]
    ranked = criticality.masked_fill(is_behind, -1.0)
    indices = ranked.topk(min(count, num_blocks), dim=-1).indices
    counts = num_before.clamp(max=count)[:, None].expand(num_segments, num_kv_heads)
    rank = torch.arange(indices.shape[-1], device=indices.device)
    beyond = rank >= counts[..., None]
    return ChosenBlocks(indices.masked_fill(beyond, num_blocks).sort(dim=-1).values, counts)


def segment_pages(
    chosen: ChosenBlocks,
    block_ids: torch.Tensor,
    own_starts: torch.Tensor,
    num_own: int,
    pages_per_block: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages that each (segment, KV head) pair reads, in the one-head view of a layer's cache.

    The chosen blocks come first, the segment's own pages last: so a token reads all of the former
    and, of its segment, what is not behind it.

    Args:
        chosen: The chosen blocks.
        block_ids: The request's block ids, `[n]` int64.
        own_starts: Index of each segment's first page in `block_ids`, `[num_segments]` int64.
        num_own: Pages of a segment.
        pages_per_block: Pages of a block of the method.

    Returns:
        `[num_segments * num_kv_heads, width]` int64, 0 past a row's last page; and how many pages
        of chosen blocks come first in each row, `[num_segments * num_kv_heads]` int64.
    """
    _, num_kv_heads, most = chosen.indices.shape
    device = block_ids.device
    column = torch.arange(most * pages_per_block + num_own, device=device)
    num_chosen = chosen.counts[..., None] * pages_per_block
    place = chosen.indices.repeat_interleave(pages_per_block, dim=-1) * pages_per_block
    place = place + torch.arange(pages_per_block, device=device).repeat(most)
    place = torch.nn.functional.pad(place, (0, num_own))
    own = own_starts[:, None, None] + column - num_chosen
    place = torch.where(column < num_chosen, place, own)
    is_beyond = column >= num_chosen + num_own
    blocks = block_ids[place.masked_fill(is_beyond, 0)]
    heads = torch.arange(num_kv_heads, device=device)[:, None]
    pages = (blocks * num_kv_heads + heads).masked_fill(is_beyond, 0)
    return pages.flatten(0, 1), num_chosen.flatten()
