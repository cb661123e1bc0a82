"""Columns: what a request holds when entries are dropped, head by head, the latest entry last."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvselect.engine.drop.page_tables import SettledRows
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.paging.compaction import head_pages
from vllm_kvselect.planning.cuts import Cut


@dataclass(frozen=True)
class Columns:
    """The entries up to a position, as columns that end with the latest one in all heads.

    Attributes:
        pages: Page ids in the memory of all layers, `[num_layers, num_kv_heads, n]` int64; 0 where
            a head has none.
        num_absent: First columns of each head without an entry, `[num_layers, num_kv_heads]`
            int64; None where nothing was dropped before, so that a column is a token.
        num_entries: Columns up to the position.
        num_packed: Columns of entries that are packed already.
    """

    pages: torch.Tensor
    num_absent: torch.Tensor | None
    num_entries: int
    num_packed: int

    @classmethod
    def of_prompt(cls, blocks: torch.Tensor, num_tokens: int, state: RetentionState) -> "Columns":
        """Those of tokens of which nothing was dropped.

        Args:
            blocks: Block ids, `[n]` int64.
            num_tokens: Tokens up to the position.
            state: State of the group's layers.
        """
        num_blocks, num_layers, _ = state.offsets.shape
        layers = torch.arange(num_layers, device=blocks.device)[:, None, None]
        pages = head_pages(blocks, state.num_kv_heads)
        return cls(pages + layers * (num_blocks * state.num_kv_heads), None, num_tokens, 0)

    @classmethod
    def after(
        cls,
        last: Cut | None,
        position: int,
        block_ids: Sequence[int],
        longest_run: int,
        block_size: int,
        state: RetentionState,
    ) -> "Columns":
        """Those of a request that generates: what is packed, and what came after it.

        Nothing here waits for a device.

        Args:
            last: The cut before, None if nothing was dropped so far.
            position: Tokens up to the position.
            block_ids: The request's block table.
            longest_run: The most packed pages that a head of a layer has.
            block_size: Tokens per block.
            state: State of the group's layers.
        """
        device = state.offsets.device
        first_packed, tail_start = (last.first_packed, last.tail_start) if last else (0, 0)
        # Block 0 has no packed pages.
        key = block_ids[first_packed] if last else 0
        integers = np.array([position, first_packed, tail_start, key, *block_ids], dtype=np.int32)
        integers = async_tensor_h2d(integers, device)
        seq_len, first, tail, key, table = integers.split([1, 1, 1, 1, len(block_ids)])
        num_columns = longest_run + ceil(position / block_size) - tail_start
        row = SettledRows(table[None], seq_len, first, tail, key.to(torch.int64))
        pages, lengths = row.page_table(state.offsets, block_size, width=num_columns)
        num_missing = num_columns - -(-lengths.to(torch.int64) // block_size)
        columns = torch.arange(num_columns, device=device) - num_missing[..., None]
        aligned = pages.to(torch.int64).gather(2, columns.clamp(min=0))
        aligned.masked_fill_(columns < 0, 0)
        unfilled = -position % block_size
        return cls(
            aligned,
            num_missing * block_size,
            num_columns * block_size - unfilled,
            longest_run * block_size,
        )

    def num_competing(self, cut: Cut, block_size: int) -> int:
        """Columns before the tail of a cut at the position, whole pages."""
        return self.num_entries - (cut.position - cut.tail_start * block_size)
