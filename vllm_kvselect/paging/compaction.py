"""Compaction: what is read out of a prompt's blocks, and where the retained entries go."""

import torch

MOST_BYTES = 2**28
"""The most that is gathered before it is scattered: memory beside the cache."""


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


def retained_slots(
    pages: torch.Tensor, retained: torch.Tensor, num_competing: int, block_size: int
) -> torch.Tensor:
    """Slot of every retained entry before it is moved.

    Args:
        pages: Page ids of what each head of each row holds, in order, `[num_heads, n]` integers.
        retained: Flat indices `head * num_competing + column`, `[m]` int64.
        num_competing: Columns that compete, a multiple of `block_size`.
        block_size: Entries per page.

    Returns:
        Slots `page * block_size + offset`, `[m]` int64.
    """
    head, column = retained // num_competing, retained % num_competing
    return pages[head, column // block_size].to(torch.int64) * block_size + column % block_size


def parts(num_elements: int, itemsize: int, num_entries: int) -> list[slice]:
    """Parts in which entries are moved, each of which is gathered before it is scattered.

    A part is some elements of *every* entry: whichever entries are written where others are read,
    no part writes what another reads.

    Returns:
        Elements of each part. Copies of a part take at most `MOST_BYTES`, but a part has 16 bytes
        of an entry at least: with fewer, memory would be read many times.
    """
    unit = max(1, 16 // itemsize)
    most = MOST_BYTES // (max(1, num_entries) * itemsize)
    size = max(unit, most // unit * unit)
    return [slice(start, min(start + size, num_elements)) for start in range(0, num_elements, size)]


def move_retained(
    memory: torch.Tensor,
    pages: torch.Tensor,
    retained: torch.Tensor,
    num_competing: int,
    packed_blocks: torch.Tensor,
) -> None:
    """Moves what rows of heads retain into their packed blocks.

    Sources and targets overlap. Rows are layers of requests; the i-th retained entry goes to the
    i-th slot of the packed blocks of all rows.

    Args:
        memory: The caches of all layers as one, `[num_blocks, num_kv_heads, block_size, width]`,
            contiguous, K and V of an entry side by side.
        pages: Page ids of what each head of each row holds, in order,
            `[num_rows * num_kv_heads, n]` integers.
        retained: Flat indices `head * num_competing + column`, ascending, `[m]` int64.
        num_competing: Columns that compete, a multiple of `block_size`.
        packed_blocks: Blocks of `memory`, row by row, which hold `m` entries.
    """
    _, num_kv_heads, block_size, width = memory.shape
    entries = memory.view(-1, width)
    sources = retained_slots(pages, retained, num_competing, block_size)
    targets = packed_slots(packed_blocks, num_kv_heads, block_size)
    for part in parts(width, memory.itemsize, len(sources)):
        entries[targets, part] = entries[sources, part]


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
