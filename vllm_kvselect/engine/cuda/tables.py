"""Head-wise page tables on a device, in the same buffers for all graphs."""

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.engine.step.split import Decodes
from vllm_kvselect.engine.view.page_tables import SettledRows
from vllm_kvselect.engine.view.sequences import HeadwiseBatch
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.paging.order import MOST_SHARED, MOST_VECTORS, Orders, Schedules, Sharing, padded
from vllm_kvselect.paging.page_table import PageTable


def table_width(max_model_len: int, block_size: int) -> int:
    """Pages that a head has at most: no more than its request has blocks.

    One more than `max_model_len` fills, for a token that is scheduled before its request ends.
    """
    return -(-max_model_len // block_size) + 1


def buffer_bytes(
    max_num_seqs: int, num_kv_heads: int, num_layers: int, max_model_len: int, block_size: int
) -> int:
    """Bytes of `HeadwiseTables`; only its smallest part grows with the number of layers."""
    table = num_kv_heads * (table_width(max_model_len, block_size) + 2 + 2 * num_layers)
    offsets = num_layers * (num_kv_heads + 1)
    num_sequences = max_num_seqs * num_kv_heads
    schedule = MOST_VECTORS * padded(min(num_sequences, MOST_SHARED)) + 4
    apart = num_layers * (1 + padded(num_sequences) - num_sequences + schedule)
    return 4 * (max_num_seqs * (table + offsets + 4) + apart + 1)


class HeadwiseTables:
    """Buffers that page tables are built in, some layers at once, and what they are built from.

    A captured graph reads these tensors again and again. `decode_batch` refills what differs from
    step to step, outside graphs; `of_layer` launches kernels, and may be captured. There is room
    for the tables of one layer with as many rows as may run, or of more layers with fewer rows.
    Attention may take the sequences of one query in any order, and be told how to share them out.
    """

    def __init__(
        self,
        state: RetentionState,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        kernels: Kernels,
        any_order: bool = False,
        sharing: Sharing | None = None,
    ) -> None:
        self._state, self._block_size = state, block_size
        self._any_order, self._sharing = any_order, sharing
        self._build, self._longest_first = kernels.headwise_page_table, kernels.longest_first
        num_layers, num_offsets = state.offsets.shape[1:]
        self.num_kv_heads = num_offsets - 1
        num_sequences = max_num_seqs * self.num_kv_heads

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=state.offsets.device)

        self._width = table_width(max_model_len, block_size)
        self._pages = zeros(num_sequences * self._width)
        # Triton compiles once more for pointers that are no multiple of 16 bytes.
        self._lengths = zeros(num_layers, padded(num_sequences))
        self._sequences = zeros(num_layers, num_sequences + 1)
        most_shared = padded(min(num_sequences, MOST_SHARED))
        self._schedules = zeros(num_layers, MOST_VECTORS * most_shared + 4)
        self._ones = zeros(num_sequences).fill_(1)
        self._cuts = zeros(2, max_num_seqs)
        self._blocks = zeros(max_num_seqs, dtype=torch.int64)
        self._offsets = zeros(max_num_seqs, num_layers, num_offsets)
        self._query_start_loc = torch.arange(
            num_sequences + 1, dtype=torch.int32, device=state.offsets.device
        )
        self._filled_with: Decodes | None = None
        self._filled: tuple[torch.Tensor, ...] = ()
        self._batch: HeadwiseBatch | None = None
        self._last, self._held = 0, range(0)

    def decode_batch(
        self, decodes: Decodes, common: CommonAttentionMetadata, num_splits: int
    ) -> HeadwiseBatch:
        """A batch of one token a row; the buffers are filled again if the rows are others.

        Rows without a cut, and those that pad the batch to a captured size, get the identity
        table: no packed pages, which is what the state has for the null block.
        """
        num_rows, table = common.num_reqs, common.block_table_tensor
        if decodes is not self._filled_with:
            self._filled_with, self._filled = decodes, self._refill(decodes, table)
        starts, *of_rows = self._filled
        return HeadwiseBatch(
            tokens=slice(0, num_rows),
            pairs=(slice(0, num_rows),),
            query_start_loc=starts,
            max_query_len=1,
            max_seq_len=common.max_seq_len,
            rows=SettledRows(table, common.seq_lens, *of_rows),
            table=None,
            num_splits=num_splits,
        )

    def _refill(self, decodes: Decodes, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Fills the buffers; their parts: where queries start, and those of `SettledRows`."""
        num_rows = len(decodes.serials)
        cuts, blocks = self._cuts[:, :num_rows], self._blocks[:num_rows]
        offsets = self._offsets[:num_rows]
        first_packed, tail_start = cuts.copy_(async_tensor_h2d(decodes.cuts, cuts.device))
        # A cut's tail never starts at block 0; block 0 of the pool is the null block.
        in_table = table.gather(1, first_packed[:, None].long())[:, 0]
        torch.mul(in_table, tail_start > 0, out=blocks)
        torch.index_select(self._state.offsets, 0, blocks, out=offsets)
        starts = self._query_start_loc[: num_rows * self.num_kv_heads + 1]
        return starts, first_packed, tail_start, blocks, offsets

    def num_queries(self, batch: HeadwiseBatch) -> torch.Tensor:
        """Those of each sequence of a batch that has an order, `[n]` int32."""
        return self._ones[: self._num_sequences(batch)]

    def of_layer(self, index: int, batch: HeadwiseBatch, again: bool = False) -> PageTable:
        """The page table of one layer, built together with those of the layers behind it.

        The batch learns the order of its sequences from its first layer. One layer comes `again`
        where it reads the cache of one before it.

        Returns:
            `[num_rows * num_kv_heads, width]` pages and their lengths.
        """
        num_sequences = self._num_sequences(batch)
        if batch is not self._batch or not (again or index > self._last):
            self._begin(batch)
        if not again:
            self._last = index
        # As many layers at once as there is room for: for all where few rows run.
        room = len(self._pages) // (num_sequences * self._width)
        pages = self._pages[: room * num_sequences * self._width]
        pages = pages.view(room, num_sequences, self._width)
        if index not in self._held:
            # One that comes again is not followed by those behind it.
            end = index + (1 if again else min(room, len(self._lengths) - index))
            self._held = range(index, end)
            self._fill(batch, slice(index, end), pages[: end - index])
        return PageTable(pages[index - self._held.start], self._lengths[index, :num_sequences])

    def _begin(self, batch: HeadwiseBatch) -> None:
        """Forgets what is held, and finds the order of the sequences of all layers."""
        self._batch, self._held = batch, range(0)
        if self._any_order and batch.max_query_len == 1:
            rows, num_sequences = batch.rows, self._num_sequences(batch)
            assert rows.offsets is not None
            of_all = self._sequences[:, : num_sequences + 1], self._lengths[:, :num_sequences]
            batch.orders = Orders(*of_all, self._schedules_of(batch))
            given = rows.seq_lens, rows.tail_start, rows.offsets.transpose(0, 1), self._block_size
            self._longest_first(*given, batch.orders)

    def _schedules_of(self, batch: HeadwiseBatch) -> Schedules | None:
        """Room for the schedules of all layers, if a schedule is what attention would make."""
        sharing, num_sequences = self._sharing, self._num_sequences(batch)
        if sharing is None or batch.num_splits != sharing.most_parts or num_sequences > MOST_SHARED:
            return None
        return Schedules(self._schedules[:, : sharing.size(num_sequences)], sharing)

    def _fill(self, batch: HeadwiseBatch, layers: slice, pages: torch.Tensor) -> None:
        """Builds the page tables of some layers."""
        rows = batch.rows
        assert rows.offsets is not None
        self._build(
            rows.block_table,
            rows.seq_lens,
            rows.first_packed,
            rows.tail_start,
            # Strides are the same for any number of rows: a captured launch compiles nothing.
            rows.offsets.transpose(0, 1)[layers],
            self._block_size,
            len(self._state.offsets),
            layers.start,
            PageTable(pages, self._lengths[layers, : pages.shape[1]]),
            None if batch.orders is None else batch.orders.sequences[layers, :-1],
            self._state.per_block,
        )

    def _num_sequences(self, batch: HeadwiseBatch) -> int:
        return len(batch.rows.seq_lens) * self.num_kv_heads
