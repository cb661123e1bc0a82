"""Head-wise page tables: one row of pages and one length per (layer, request, KV head)."""

from typing import NamedTuple

import torch


class PageTable(NamedTuple):
    """A batch as a one-head paged cache sees it: every (request, KV head) pair is a sequence.

    Attributes:
        pages: Page ids, `[num_layers, num_reqs * num_kv_heads, width]` int32; entries past a
            sequence's last page are 0, the null block's first page.
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
    out: PageTable | None = None,
) -> PageTable:
    """Builds the page tables of requests whose prompts are compacted, for several layers at once.

    Head `h` of a request owns the pages `offsets[h] .. offsets[h + 1]` of the request's run; page
    `i` of the run lies in block `first_packed + i // num_kv_heads`, slot `i % num_kv_heads`. In
    tail blocks head `h` owns slot `h`.

    Args:
        block_table: Block ids, `[num_reqs, max_num_blocks]`.
        seq_lens: Tokens of each request, the dropped ones included, `[num_reqs]`.
        first_packed: Index of the first packed block, `[num_reqs]`.
        tail_start: Index of the first tail block, `[num_reqs]`.
        offsets: Where each head's run starts, `[num_layers, num_reqs, num_kv_heads + 1]`.
        block_size: Entries per page.
        out: Buffers to fill, as a captured graph needs them: nothing is read back for their width,
            and what they hold past a sequence's last page stays.

    Returns:
        The page tables, `out` if that is given. Every page but a sequence's last one is full.
    """
    num_layers, num_reqs, num_kv_heads = offsets.shape[0], offsets.shape[1], offsets.shape[2] - 1
    offsets = offsets.to(torch.int64)
    start, num_run_pages = offsets[..., :-1, None], offsets.diff(dim=-1)[..., None]
    tail_len = (seq_lens - tail_start * block_size).to(torch.int64)[:, None, None]
    num_pages = num_run_pages + -(-tail_len // block_size)

    if out is None:
        out = _empty_table(num_layers, num_reqs * num_kv_heads, num_pages)

    column = torch.arange(out.pages.shape[2], device=offsets.device)
    in_run = column < num_run_pages
    head = torch.arange(num_kv_heads, device=offsets.device)[:, None]
    run_page = start + column
    block_index = torch.where(
        in_run,
        first_packed[:, None, None] + run_page // num_kv_heads,
        tail_start[:, None, None] + column - num_run_pages,
    )
    slot = torch.where(in_run, run_page % num_kv_heads, head)
    used = column < num_pages
    block_index = block_index.masked_fill_(~used, 0)
    rows = torch.arange(num_reqs, device=offsets.device)[:, None, None]
    pages = block_table.to(torch.int64)[rows, block_index] * num_kv_heads + slot
    before = out.pages.view(num_layers, num_reqs, num_kv_heads, -1)
    out.pages.copy_(torch.where(used, pages, before).flatten(1, 2))
    out.seq_lens.copy_((num_run_pages * block_size + tail_len).reshape(num_layers, -1))
    return out


def _empty_table(num_layers: int, num_sequences: int, num_pages: torch.Tensor) -> PageTable:
    """A table as wide as its longest sequence, which is read back from the device."""
    pages = num_pages.new_zeros(num_layers, num_sequences, int(num_pages.max()), dtype=torch.int32)
    return PageTable(pages, num_pages.new_zeros(num_layers, num_sequences, dtype=torch.int32))
