"""Page offsets of what is packed, and page tables of decoding rows.

A decode step makes every sequence one entry longer and, until a block is full, nothing else. So
tables are built anew only when their blocks change.
"""

from dataclasses import dataclass

import torch

from vllm_kvselect.paging.page_table import PageTable, headwise_page_table


class PageOffsets:
    """Page offsets of the requests in a worker's KV cache.

    `offsets` says where each head's pages start in the run of the request's packed pages, which
    counts through all layers (`page_table.py`). It is keyed by the id of a request's first packed
    block, which no other packed run has: it needs no request ids, survives reordering of the batch,
    serves all requests that share a context, and dies with the block. Block 0, vLLM's null block,
    keeps offsets of 0: no packed pages. `version` counts changes of the offsets, so that what was
    built from them is known to be out of date. Blocks are kernel blocks, `per_block` of one of the
    scheduler's.
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        device: torch.device | str,
        per_block: int,
    ) -> None:
        self.num_layers, self.num_kv_heads, self.per_block = num_layers, num_kv_heads, per_block
        self.offsets = torch.zeros(
            num_blocks, num_layers, num_kv_heads + 1, dtype=torch.int32, device=device
        )
        self.version = 0

    def store(self, keys: torch.Tensor, offsets: torch.Tensor) -> None:
        """Remembers where the pages of the heads of some requests start.

        Args:
            keys: Ids of their first packed blocks, `[n]` int64.
            offsets: `[n, num_layers, num_kv_heads + 1]`.
        """
        self.offsets[keys] = offsets.to(self.offsets.dtype)
        self.version += 1


@dataclass
class SettledRows:
    """Rows that read what is packed, `num_rows` each, as copies: a runner changes its own in place.

    Attributes:
        block_table: `[num_rows, max_num_blocks]`.
        seq_lens: Tokens of each request, the dropped ones included.
        first_packed: Index of the first packed block.
        tail_start: Index of the first tail block.
        first_packed_blocks: Id of the first packed block, int64: the key of the state.
        offsets: What the state has for these rows, `[num_rows, num_layers, num_kv_heads + 1]`,
            where that is fetched for all layers at once; else None.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    first_packed: torch.Tensor
    tail_start: torch.Tensor
    first_packed_blocks: torch.Tensor
    offsets: torch.Tensor | None = None

    def page_table(
        self,
        state: PageOffsets,
        page_size: int,
        layers: slice = slice(None),
        width: int | None = None,
    ) -> PageTable:
        """Page tables of some layers; without a width, the longest sequence's is read back."""
        offsets, out = state.offsets, None
        if width is not None:
            num_layers, num_offsets = offsets[0, layers].shape
            shape = (num_layers, len(self.seq_lens) * (num_offsets - 1))
            pages = offsets.new_zeros(*shape, width, dtype=torch.int32)
            out = PageTable(pages, offsets.new_zeros(shape, dtype=torch.int32))
        return headwise_page_table(
            self.block_table,
            self.seq_lens,
            self.first_packed,
            self.tail_start,
            offsets[self.first_packed_blocks, layers].transpose(0, 1),
            page_size,
            len(offsets),
            layers.start or 0,
            out,
            per_block=state.per_block,
        )

    def has_pages_of(self, other: "SettledRows", page_size: int) -> bool:
        """Whether the rows have the same pages as others, if the state is the same."""
        return (
            self.block_table.shape == other.block_table.shape
            and torch.equal(self.first_packed, other.first_packed)
            and torch.equal(self.tail_start, other.tail_start)
            # Beyond its last block a row holds anything, also what comes next.
            and torch.equal(-(-self.seq_lens // page_size), -(-other.seq_lens // page_size))
            and torch.equal(self.block_table, other.block_table)
        )


class PageTables:
    """Builds the page tables of all layers of a group, or brings the last ones up to date."""

    def __init__(self, state: PageOffsets, page_size: int) -> None:
        self._state, self._page_size = state, page_size
        self._built: tuple[int, SettledRows, PageTable] | None = None

    def of(self, rows: SettledRows) -> PageTable:
        """The page tables of rows."""
        version = self._state.version
        if self._built is not None:
            built_version, built_rows, table = self._built
            if built_version == version and rows.has_pages_of(built_rows, self._page_size):
                num_heads = table.seq_lens.shape[1] // len(rows.seq_lens)
                more = (rows.seq_lens - built_rows.seq_lens).repeat_interleave(num_heads)
                return PageTable(table.pages, table.seq_lens + more.to(torch.int32))
        table = rows.page_table(self._state, self._page_size)
        self._built = version, rows, table
        return table
