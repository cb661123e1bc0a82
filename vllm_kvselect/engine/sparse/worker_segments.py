"""Sparse segments of a step: which pages they read in each layer.

A pair of a segment and a KV head is a sequence of the one-head view: the pages of the blocks that
were chosen for it, then its own. Its queries are the last tokens of that sequence, so each reads
what lies before it and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvselect.config import Prefill
from vllm_kvselect.engine.sparse.worker_keys import KeyBlocks, SparseLayer, SparsePrefill
from vllm_kvselect.engine.view.rows import Rows, head_queries, on_device, start_loc, token_indices
from vllm_kvselect.engine.view.sequences import OneHeadBatch
from vllm_kvselect.paging.page_table import PageTable
from vllm_kvselect.prefilling.blocks import ChosenBlocks, most_critical, segment_pages
from vllm_kvselect.prefilling.criticality import fused


@dataclass
class SparseRow:
    """The sparse segments of one row of a batch.

    Attributes:
        prefill: Its request's.
        tokens: The tokens in the batch.
        starts: Position of each segment.
        chunk: All tokens of the row up to there, in the batch.
        chunk_start: Position of the first of them.
        block_ids: Ids of the blocks up to the last segment's end, `[n]` int64.
        page_size: Tokens of such a block.
        fused: Criticality in the sparse layer before, or None.
    """

    prefill: SparsePrefill
    tokens: slice
    starts: range
    chunk: slice
    chunk_start: int
    block_ids: torch.Tensor
    page_size: int
    fused: torch.Tensor | None = None

    def table(
        self, query: torch.Tensor, at_hand: torch.Tensor | None, scale: float, layer: SparseLayer
    ) -> PageTable:
        """Pages of the row's sequences in a layer, segment by segment, head by head.

        Args:
            query: Queries of the tokens as scorers take them, `[num_tokens, num_heads, head_size]`.
            at_hand: Keys of the chunk, `[num_kv_heads, n, head_size]`, if attention reads these.
            scale: Factor of products of queries and keys.
            layer: The layer.

        Returns:
            `[num_sequences, width]` and `[num_sequences]`, both int64.
        """
        size, block = self.starts.step, self.prefill.config.of(Prefill).prefill_block
        starts = torch.arange(
            self.starts.start, self.starts.stop, size, device=self.block_ids.device
        )
        chosen = self._choose(query, at_hand, scale, layer, starts // block)
        pages, num_chosen = segment_pages(
            chosen,
            self.block_ids,
            starts // self.page_size,
            size // self.page_size,
            block // self.page_size,
        )
        # The one-head view spans the layers, which lie one after the other.
        pages += layer.layer_index * layer.kv_cache.shape[0] * layer.num_kv_heads
        return PageTable(pages, num_chosen * self.page_size + size)

    def _choose(
        self,
        query: torch.Tensor,
        at_hand: torch.Tensor | None,
        scale: float,
        layer: SparseLayer,
        num_before: torch.Tensor,
    ) -> ChosenBlocks:
        """The blocks that each segment reads."""
        config, size = self.prefill.config.of(Prefill), self.starts.step
        num_blocks = self.starts[-1] // config.prefill_block
        keys = self.prefill.key_blocks(layer.layer_index)
        self._learn(keys, num_blocks, at_hand, layer)
        segments = layer.kernels.extremes(query.transpose(0, 1), size)
        current = layer.kernels.criticality(segments, keys.known(num_blocks), scale, num_before)
        self.fused = fused(current, self.fused, config.prefill_layer_fusion)
        return most_critical(self.fused, num_before, config.prefill_budget // config.prefill_block)

    def _learn(
        self, keys: KeyBlocks, num_blocks: int, at_hand: torch.Tensor | None, layer: SparseLayer
    ) -> None:
        """Adds the blocks before the last segment that are not known yet.

        Those of this chunk are at hand. Others were computed by earlier steps, densely, or by
        another request, and are read from the cache.
        """
        block = self.prefill.config.of(Prefill).prefill_block
        end = num_blocks * block
        # The chunk may begin inside a block, where what is before it is not sparse.
        first_at_hand = -(-self.chunk_start // block) * block if at_hand is not None else end
        begin = keys.num_known * block
        for stop in (min(first_at_hand, end), end):
            if begin >= stop:
                continue
            if begin >= first_at_hand and at_hand is not None:
                part = slice(begin - self.chunk_start, stop - self.chunk_start)
                keys.add(at_hand[:, part], layer)
            else:
                blocks = self.block_ids[begin // self.page_size : stop // self.page_size]
                keys.add(layer.read_keys(layer.pages_of(blocks)), layer)
            begin = stop


@dataclass
class SparseBatch(OneHeadBatch):
    """Sparse segments of a batch, one sequence per (segment, KV head)."""

    rows: list[SparseRow]


def sparse_rows(
    rows: Rows, prefills: Sequence[SparsePrefill | None], block_table: torch.Tensor, page_size: int
) -> dict[int, SparseRow]:
    """The sparse segments of a batch, by row; `block_table` has its rows' block ids."""
    found = {}
    for row, prefill in enumerate(prefills):
        if prefill is None:
            continue
        tokens, begin = rows.tokens(row), int(rows.num_computed[row])
        starts = prefill.segments.sparse_part(begin, begin + tokens.stop - tokens.start)
        if not starts:
            continue
        end, shift = starts[-1] + prefill.segments.size, tokens.start - begin
        found[row] = SparseRow(
            prefill=prefill,
            tokens=slice(starts.start + shift, end + shift),
            starts=starts,
            chunk=slice(tokens.start, end + shift),
            chunk_start=begin,
            block_ids=block_table[row, : end // page_size].to(torch.int64),
            page_size=page_size,
        )
    return found


def sparse_batch(rows: list[SparseRow], max_seq_len: int, num_kv_heads: int) -> SparseBatch:
    """Puts the sparse segments of some rows into one batch."""
    device = rows[0].block_ids.device
    lens = np.repeat([row.starts.step for row in rows], [len(row.starts) for row in rows])
    starts = np.concatenate(
        [row.tokens.start + np.arange(len(row.starts)) * row.starts.step for row in rows]
    )
    pairs = head_queries(starts, lens, num_kv_heads)
    return SparseBatch(
        tokens=on_device(token_indices(starts, lens), device),
        pairs=tuple(on_device(part, device) for part in pairs),
        query_start_loc=async_tensor_h2d(start_loc(np.repeat(lens, num_kv_heads)), device),
        max_query_len=int(lens.max()),
        max_seq_len=max_seq_len,
        rows=rows,
    )


def joined(tables: list[PageTable]) -> PageTable:
    """Puts the tables of rows below each other, as kernels take them.

    Args:
        tables: Of each row `[num_sequences, width]` and `[num_sequences]`.

    Returns:
        Both int32; as wide as the widest, filled up with 0.
    """
    width = max(table.pages.shape[1] for table in tables)
    pages = [
        torch.nn.functional.pad(table.pages, (0, width - table.pages.shape[1])) for table in tables
    ]
    seq_lens = [table.seq_lens for table in tables]
    return PageTable(torch.cat(pages).to(torch.int32), torch.cat(seq_lens).to(torch.int32))
