"""Head-wise page tables: one row of pages and one length per (layer, request, KV head)."""

from typing import NamedTuple

import torch


class PageTable(NamedTuple):
    """A batch as a one-head paged cache sees it: every (request, KV head) pair is a sequence.

    Attributes:
        pages: Page ids in the memory of all layers, `[num_layers, num_reqs * num_kv_heads, width]`
            int32; entries past a sequence's last page are 0, the null block's first page.
        seq_lens: Entries per sequence, `[num_layers, num_reqs * num_kv_heads]` int32.
    """

    pages: torch.Tensor
    seq_lens: torch.Tensor


def headwise_page_table(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    first_packed: torch.Tensor,
    tail_start: torch.Tensor,
    offsets: torch.Tensor,
    block_size: int,
    num_blocks: int,
    first_layer: int = 0,
    out: PageTable | None = None,
    order: torch.Tensor | None = None,
    per_block: int = 1,
) -> PageTable:
    """Builds the page tables of requests whose prompts are compacted, for several layers at once.

    The layers' caches lie one after the other in memory: block `b` of layer `l` has the pages from
    `(l * num_blocks + b) * num_kv_heads` on. A request's packed blocks are a run of pages, layer by
    layer, block by block, slot by slot: with `n` packed blocks page `i` of the run lies in layer
    `i // (n * num_kv_heads)`, block `first_packed + i // num_kv_heads % n`, slot
    `i % num_kv_heads`. Head `h` owns the pages `offsets[h] .. offsets[h + 1]` of the run: with a
    pool they may lie in any layer's memory. In tail blocks head `h` owns slot `h` of its layer.

    Args:
        block_table: Block ids, `[num_reqs, max_num_blocks]`.
        seq_lens: Tokens of each request, the dropped ones included, `[num_reqs]`.
        first_packed: Index of the first packed block, `[num_reqs]`.
        tail_start: Index of the first tail block, `[num_reqs]`.
        offsets: Where each head's pages start in the run, and where the last one's end,
            `[num_layers, num_reqs, num_kv_heads + 1]`.
        block_size: Entries per page.
        num_blocks: Blocks of the cache.
        first_layer: The layer of `offsets[0]`.
        out: Buffers to fill, as a captured graph needs them: nothing is read back for their width,
            and what they hold past a sequence's last page stays.
        order: The sequence of each row of a layer, `[num_layers, num_reqs * num_kv_heads]`, where
            it is not the row's own; see `order.py`.
        per_block: What is packed ends at a multiple of so many blocks, the last one up to the tail.

    Returns:
        The page tables, `out` if that is given. Every page but a sequence's last one is full.
    """
    num_layers, num_reqs, num_kv_heads = offsets.shape[0], offsets.shape[1], offsets.shape[2] - 1
    device = offsets.device
    # Kernels take page ids as int32, so nothing here is larger; int64 would take twice the time.
    offsets, block_table = offsets.to(torch.int32).contiguous(), block_table.to(torch.int32)
    seq_lens, first_packed, tail_start = (
        part.to(torch.int32)[:, None, None] for part in (seq_lens, first_packed, tail_start)
    )
    packed_end = tail_start - tail_start % per_block
    num_packed = (packed_end - first_packed).clamp_(min=1)
    start, num_run_pages = offsets[..., :-1, None], offsets.diff(dim=-1)[..., None]
    tail_len = seq_lens - tail_start * block_size
    num_pages = num_run_pages + -(-tail_len // block_size)

    if out is None:  # as wide as the longest sequence, which is read back from the device
        shape = num_layers, num_reqs * num_kv_heads, int(num_pages.max())
        out = PageTable(num_pages.new_zeros(shape), num_pages.new_zeros(shape[:2]))

    def arange(begin: int, end: int) -> torch.Tensor:
        return torch.arange(begin, end, dtype=torch.int32, device=device)

    column = arange(0, out.pages.shape[2])
    in_run, is_beyond = column < num_run_pages, column >= num_pages
    run_page = start + column
    run_block = run_page.div(num_kv_heads, rounding_mode="trunc")  # counted through the layers
    run_layer = run_block.div(num_packed, rounding_mode="trunc")
    block_index = torch.where(
        in_run,
        run_block - run_layer * num_packed + first_packed,
        column + (tail_start - num_run_pages),
    )
    row_start = (arange(0, num_reqs) * block_table.shape[1])[:, None, None]
    places = (block_index + row_start).masked_fill_(is_beyond, 0)
    block = block_table.flatten().index_select(0, places.flatten()).view(places.shape)

    layer_pages = num_blocks * num_kv_heads
    layer = arange(first_layer, first_layer + num_layers)[:, None, None, None]
    slot = torch.where(
        in_run,
        run_page - run_block * num_kv_heads + run_layer * layer_pages,
        arange(0, num_kv_heads)[:, None] + layer * layer_pages,
    )
    pages = block * num_kv_heads + slot
    lengths = (num_run_pages * block_size + tail_len).flatten(1)
    is_beyond = is_beyond.expand(pages.shape)
    pages, is_beyond = pages.flatten(1, 2), is_beyond.flatten(1, 2)
    if order is not None:
        order = order.to(torch.int64)
        pages, is_beyond = (part.take_along_dim(order[..., None], 1) for part in (pages, is_beyond))
        lengths = lengths.gather(1, order)
    out.pages.copy_(torch.where(is_beyond, out.pages, pages))
    out.seq_lens.copy_(lengths)
    return out
