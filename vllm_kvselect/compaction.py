"""Compaction: where the retained entries go inside the packed blocks."""

import torch


def run_pages(packed_blocks: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Lists the head-wise pages of a request's packed blocks in the order they are handed out.

    Args:
        packed_blocks: Block ids, `[num_packed]`.
        num_kv_heads: KV heads, and so pages, per block and layer.

    Returns:
        Page ids `block_id * num_kv_heads + slot`, `[num_packed * num_kv_heads]`.
    """
    slots = torch.arange(num_kv_heads, dtype=packed_blocks.dtype, device=packed_blocks.device)
    return (packed_blocks[:, None] * num_kv_heads + slots).flatten()


def packed_slots(packed_blocks: torch.Tensor, num_kv_heads: int, block_size: int) -> torch.Tensor:
    """Slot of every retained entry in the one-head view of the cache.

    Heads get whole pages, so the i-th retained entry, heads in order and tokens ascending, goes to
    the i-th slot of the run, whatever the heads' budgets are.

    Args:
        packed_blocks: Block ids, `[num_packed]`.
        num_kv_heads: KV heads per block and layer.
        block_size: Entries per page.

    Returns:
        Slots `page * block_size + offset`, `[num_packed * num_kv_heads * block_size]` int64.
    """
    pages = run_pages(packed_blocks.to(torch.int64), num_kv_heads)
    offsets = torch.arange(block_size, dtype=torch.int64, device=pages.device)
    return (pages[:, None] * block_size + offsets).flatten()
