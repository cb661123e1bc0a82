"""Compaction: what is read out of a prompt's blocks, and where the retained entries go."""

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


def pool_slots(
    packed_blocks: torch.Tensor,
    num_kv_heads: int,
    block_size: int,
    num_layers: int,
    num_blocks: int,
) -> torch.Tensor:
    """Slot of every entry that the layers of a pool retain, in the memory of all layers.

    Args:
        packed_blocks: Block ids, `[num_packed]`.
        num_kv_heads: KV heads per block and layer.
        block_size: Entries per page.
        num_layers: Layers of the pool.
        num_blocks: Blocks of the cache; block `b` of layer `l` is block `l * num_blocks + b` there.

    Returns:
        `[num_layers * num_packed * num_kv_heads * block_size]` int64: the slots of `packed_slots`,
        layer after layer.
    """
    layers = torch.arange(num_layers, dtype=torch.int64, device=packed_blocks.device)
    blocks = layers[:, None] * num_blocks + packed_blocks
    return packed_slots(blocks.flatten(), num_kv_heads, block_size)


def retained_slots(
    retained: torch.Tensor,
    num_competing: int,
    blocks: torch.Tensor,
    num_kv_heads: int,
    block_size: int,
    num_blocks: int,
) -> torch.Tensor:
    """Slot of every retained entry before it is moved, in the memory of all layers.

    Args:
        retained: Flat indices `(layer * num_kv_heads + head) * num_competing + token`, `[n]` int64.
        num_competing: Tokens before the tail, a multiple of `block_size`.
        blocks: Block ids of the prompt, int64.
        num_kv_heads: KV heads per block and layer.
        block_size: Entries per page.
        num_blocks: Blocks of the cache.

    Returns:
        `[n]` int64.
    """
    owner, token = retained // num_competing, retained % num_competing
    layer, head = owner // num_kv_heads, owner % num_kv_heads
    block = layer * num_blocks + blocks[token // block_size]
    return (block * num_kv_heads + head) * block_size + token % block_size


def read_pages(cache: torch.Tensor, pages: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Reads whole pages, or parts of them, in an order of one's own.

    Args:
        cache: `[num_pages, num_elements]`, rows at any stride.
        pages: Which pages, `[n]` int64.
        places: Which elements of each, in order, `[m]` int32.

    Returns:
        `[n, m]`.
    """
    return cache.index_select(0, pages).index_select(1, places)


def gather_entries(
    entries: torch.Tensor, retained: torch.Tensor, num_competing: int
) -> torch.Tensor:
    """Collects the retained keys, or values.

    Args:
        entries: `[num_kv_heads, num_tokens, head_size]`, at any strides.
        retained: Flat indices `head * num_competing + token`, `[n]` int64.
        num_competing: Tokens before the tail, at most `num_tokens`.

    Returns:
        `[n, head_size]`.
    """
    return entries[retained // num_competing, retained % num_competing]
