"""Tokens past their cuts as sequences of a one-head cache, and the calls that attend to them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvselect.engine.view.page_tables import SettledRows
from vllm_kvselect.engine.view.rows import (
    Rows,
    Tokens,
    head_queries,
    on_device,
    start_loc,
    token_indices,
)
from vllm_kvselect.paging.order import Orders
from vllm_kvselect.paging.page_table import PageTable


class Call(NamedTuple):
    """Sequences that a kernel takes in one call.

    Attributes:
        pairs: Their (token, KV head) pairs, an index of `[num_tokens, num_kv_heads, ...]`.
        query_start_loc: Where their queries start, `[num_sequences + 1]` int32.
        table: Their pages `[num_sequences, width]` and lengths `[num_sequences]`.
        sinks: Attention sinks of their query heads, `[group]`, or None.
    """

    pairs: tuple[Tokens | int, ...]
    query_start_loc: torch.Tensor
    table: PageTable
    sinks: torch.Tensor | None

    def take(self, by_head: torch.Tensor) -> torch.Tensor:
        """Their part of `[num_tokens, num_kv_heads, group, head_size]`, sequence by sequence.

        Returns:
            `[num_queries, group, head_size]`; of contiguous tensors a view, if `pairs` permit.
        """
        if self.pairs != (slice(0, len(by_head)),):
            by_head = by_head[self.pairs]
        return by_head.flatten(0, -3)

    def room(self, query: torch.Tensor, by_head: torch.Tensor) -> torch.Tensor:
        """Where they write: what `take` gives if that is a view, else memory for `put`."""
        return by_head.new_empty(query.shape) if self._is_copied else self.take(by_head)

    def put(self, part: torch.Tensor, by_head: torch.Tensor) -> None:
        """Writes back what could not be written as a view."""
        if self._is_copied:
            by_head[self.pairs] = part.view(-1, *by_head.shape[len(self.pairs) :])

    @property
    def _is_copied(self) -> bool:
        return any(isinstance(index, torch.Tensor) for index in self.pairs)


@dataclass
class OneHeadBatch:
    """Tokens of a batch as sequences of a one-head cache.

    Attributes:
        tokens: The tokens, row by row.
        pairs: Their (token, KV head) pairs, sequence by sequence, as in `Call`.
        query_start_loc: Where the sequences' queries start, `[num_sequences + 1]` int32.
        max_query_len: Most queries of a sequence.
        max_seq_len: Upper bound on its entries.
        num_splits: Most parts into which the kernel may cut a sequence; 0 leaves it to the kernel.
        orders: Where the rows of page tables come in another order: each layer's.
    """

    tokens: Tokens
    pairs: tuple[Tokens, ...]
    query_start_loc: torch.Tensor
    max_query_len: int
    max_seq_len: int
    num_splits: int = field(default=0, kw_only=True)
    orders: Orders | None = field(default=None, kw_only=True)

    def calls(
        self, table: PageTable, num_kv_heads: int, sinks: torch.Tensor | None
    ) -> Iterator[Call]:
        """All sequences in one call, or with attention sinks those of one KV head after the other.

        A kernel takes one set of sinks for all sequences of a call.

        Args:
            table: Pages and lengths of a layer's sequences.
            num_kv_heads: KV heads on this rank.
            sinks: The layer's attention sinks, `[num_heads]`, or None.
        """
        if sinks is None:
            yield Call(self.pairs, self.query_start_loc, table, None)
            return
        starts = self.query_start_loc[::num_kv_heads] // num_kv_heads
        for head, of_head in enumerate(sinks.view(num_kv_heads, -1)):
            pages, seq_lens = (part[head::num_kv_heads] for part in table)
            # Kernels take rows of pages at any distance, but lengths side by side.
            part = PageTable(pages, seq_lens.contiguous())
            yield Call((self.tokens, head), starts, part, of_head)


@dataclass
class HeadwiseBatch(OneHeadBatch):
    """Tokens past their cuts, one sequence per (row, KV head).

    Attributes:
        rows: The rows they belong to.
        table: Page tables of all layers, or None where they are built layer by layer: on a device.
    """

    rows: SettledRows
    table: PageTable | None

    @cached_property
    def by_layer(self) -> list[PageTable]:
        """The page tables of all layers one by one; `table` must be there."""
        assert self.table is not None
        return [PageTable(*layer) for layer in zip(*map(torch.unbind, self.table), strict=True)]


def headwise_batch(
    rows: Rows, chosen: np.ndarray, common: CommonAttentionMetadata, num_kv_heads: int
) -> HeadwiseBatch:
    """Collects the tokens of chosen rows, which are past their cuts; page tables come later."""
    cuts = [cut for row in chosen if (cut := rows.cuts[row]) is not None]
    lens, starts = rows.query_lens[chosen], rows.query_start[chosen]
    device = common.block_table_tensor.device
    first_packed, tail_start = (
        async_tensor_h2d(np.array(indices, dtype=np.int32), device)
        for indices in ([cut.first_packed for cut in cuts], [cut.tail_start for cut in cuts])
    )
    indices = async_tensor_h2d(chosen, device)
    table = common.block_table_tensor.index_select(0, indices)
    tokens = on_device(token_indices(starts, lens), device)
    pairs: tuple[Tokens, ...] = (tokens,)
    if lens.max() > 1:
        pairs = tuple(on_device(part, device) for part in head_queries(starts, lens, num_kv_heads))
    return HeadwiseBatch(
        tokens=tokens,
        pairs=pairs,
        query_start_loc=async_tensor_h2d(start_loc(np.repeat(lens, num_kv_heads)), device),
        max_query_len=int(lens.max()),
        max_seq_len=int(rows.seq_lens[chosen].max()),
        rows=SettledRows(
            block_table=table,
            # The host may know no more than an upper bound.
            seq_lens=common.seq_lens.index_select(0, indices),
            first_packed=first_packed,
            tail_start=tail_start,
            first_packed_blocks=table.gather(1, first_packed[:, None].long()).squeeze(1).long(),
        ),
        table=None,
    )
