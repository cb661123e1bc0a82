"""Compaction: what is read out of a prompt's blocks, and where the retained entries go."""

from collections.abc import Sequence

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


def head_pages(blocks: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Lists the pages of a prompt's blocks as vLLM fills them: head `h` in slot `h` of each.

    Args:
        blocks: Block ids in token order, `[n]` int64.
        num_kv_heads: KV heads per block and layer.

    Returns:
        Page ids, `[num_kv_heads, n]` int64.
    """
    return blocks * num_kv_heads + torch.arange(num_kv_heads, device=blocks.device)[:, None]


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


def through_layers(retained: Sequence[torch.Tensor], per_layer: int) -> torch.Tensor:
    """Joins what layers retain, each by indices of its own, or all of them together.

    Args:
        retained: Flat indices of each layer, or those of all layers as the only part.
        per_layer: Entries of a layer that compete.

    Returns:
        Flat indices that count through the layers, `[n]` int64.
    """
    return torch.cat([part + index * per_layer for index, part in enumerate(retained)])


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


def read_entries(
    cache: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Reads single entries out of pages of any inner order, a part of each entry.

    Args:
        cache: `[num_pages, num_elements]`, rows at any stride.
        slots: Which entries, `page * block_size + offset`, `[n]` int64.
        places: Which elements of a page, entry by entry, `[block_size * m]` int32.
        block_size: Entries per page.

    Returns:
        `[n, m]`.
    """
    page, offset = slots // block_size, slots % block_size
    return cache[page[:, None], places.view(block_size, -1)[offset]]


def write_entries(
    cache: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    block_size: int,
    entries: torch.Tensor,
) -> None:
    """Writes what `read_entries` reads.

    Args:
        cache: As in `read_entries`.
        slots: Likewise, none twice.
        places: Likewise.
        block_size: Entries per page.
        entries: `[n, m]`.
    """
    page, offset = slots // block_size, slots % block_size
    cache[page[:, None], places.view(block_size, -1)[offset]] = entries


def look_up(codes: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Reads bytes as the numbers that they stand for.

    Args:
        codes: uint8, contiguous, of any shape.
        numbers: What each byte stands for, `[256]`.

    Returns:
        Shaped as `codes`, of the numbers' dtype.
    """
    return numbers.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


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


def gather_from_blocks(
    cache: torch.Tensor, blocks: torch.Tensor, retained: torch.Tensor, num_competing: int
) -> torch.Tensor:
    """Collects the retained entries out of a prompt's blocks, where K and V stand side by side.

    All are read before any is written (`scatter_entries`): sources and targets overlap.

    Args:
        cache: A layer's cache, `[num_blocks, num_kv_heads, block_size, width]`, with K and V of
            an entry in one row (as on CUDA), at any strides.
        blocks: Block ids of the prompt in token order, `[n]`.
        retained: Flat indices `head * num_competing + token`, `[m]` int64.
        num_competing: Tokens before the tail.

    Returns:
        `[m, width]`.
    """
    head, token = retained // num_competing, retained % num_competing
    block_size = cache.shape[2]
    return cache[blocks.to(torch.int64)[token // block_size], head, token % block_size]


def scatter_entries(cache: torch.Tensor, slots: torch.Tensor, entries: torch.Tensor) -> None:
    """Writes entries, K and V side by side, into slots of the one-head view of the cache.

    Args:
        cache: As in `gather_from_blocks`.
        slots: `page * block_size + offset`, as from `packed_slots`, `[m]` int64, none twice.
        entries: `[m, width]`.
    """
    num_kv_heads, block_size = cache.shape[1:3]
    page = slots // block_size
    cache[page // num_kv_heads, page % num_kv_heads, slots % block_size] = entries
