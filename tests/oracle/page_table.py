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
    pages: Sequence[Sequence[int]],
    layer: int,
    head: int,
    block_size: int,
    num_blocks: int,
) -> Row:
    """Pages of one KV head of a layer: its run in the packed blocks, then its slot of every tail
    block.

    `pages[layer][head]` are handed out in order: layer by layer, block by block, slot by slot.
    """
    num_kv_heads = len(pages[0])

    def page(of_layer: int, block: int, slot: int) -> int:
        return of_layer * num_blocks * num_kv_heads + block * num_kv_heads + slot

    run = [
        page(of_layer, block, slot)
        for of_layer in range(len(pages))
        for block in blocks[first_packed:tail_start]
        for slot in range(num_kv_heads)
    ]
    for owner in range(layer * num_kv_heads + head):
        del run[: pages[owner // num_kv_heads][owner % num_kv_heads]]
    row = run[: pages[layer][head]]
    num_entries = len(row) * block_size
    for index in range(tail_start, len(blocks)):
        num_in_block = min(block_size, seq_len - index * block_size)
        if num_in_block > 0:
            row.append(page(layer, blocks[index], head))
            num_entries += num_in_block
    return Row(row, num_entries)
