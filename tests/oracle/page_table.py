"""Pages and entries of one row of a page table."""

from collections.abc import Sequence
from typing import NamedTuple

from tests.oracle.types import Cube


def packed_places(packed: Sequence[int], pages: Sequence[int], block_size: int) -> Cube:
    """Where each head's retained entries lie: `[head][index] = (block, slot, offset)`.

    The pages of the packed blocks are handed out in order, block by block, slot by slot.
    """
    free_pages = [(block, slot) for block in packed for slot in range(len(pages))]
    places: list[list[tuple[int, int, int]]] = []
    for count in pages:
        own, free_pages = free_pages[:count], free_pages[count:]
        places.append([(block, slot, o) for block, slot in own for o in range(block_size)])
    return places


class Row(NamedTuple):
    """One (layer, request, KV head) as a sequence of a one-head paged cache."""

    pages: list[int]
    num_entries: int


def page_row(
    blocks: Sequence[int],
    seq_len: int,
    first_packed: int,
    tail_start: int,
    pages: Sequence[int],
    head: int,
    block_size: int,
) -> Row:
    """Pages of one KV head: its run in the packed blocks, then its slot of every tail block."""
    num_kv_heads = len(pages)
    row: list[int] = []
    for run_page in range(sum(pages[:head]), sum(pages[: head + 1])):
        block = blocks[first_packed + run_page // num_kv_heads]
        row.append(block * num_kv_heads + run_page % num_kv_heads)
    num_entries = len(row) * block_size
    for index in range(tail_start, len(blocks)):
        num_in_block = min(block_size, seq_len - index * block_size)
        if num_in_block > 0:
            row.append(blocks[index] * num_kv_heads + head)
            num_entries += num_in_block
    return Row(row, num_entries)
