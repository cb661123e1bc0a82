"""Splits a batch into parts: what vLLM's own call computes, and what the one-head view does.

A chunk is split at its request's cut: up to there vLLM's attention reads the whole cache, beyond
it the tokens read the retained entries only. Rows without a cut stay vLLM's.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvselect.config import Prefill
from vllm_kvselect.engine.drop.columns import Columns
from vllm_kvselect.engine.drop.drop import Drop
from vllm_kvselect.engine.drop.page_tables import PageTables, SettledRows
from vllm_kvselect.engine.drop.request import Request, RequestsOf
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.engine.step.pieces import Pieces, sparse_batch, sparse_rows
from vllm_kvselect.engine.step.rows import Rows, Tokens, on_device, start_loc, token_indices
from vllm_kvselect.engine.step.sequences import HeadwiseBatch, headwise_batch
from vllm_kvselect.engine.step.sparse import SparseBatch, SparseRow
from vllm_kvselect.paging.page_table import PageTable
from vllm_kvselect.planning.cuts import Cut
from vllm_kvselect.scoring.memory import ObservingMemory, StepQueries


@dataclass
class StockPart:
    """Tokens that vLLM's own call computes.

    Attributes:
        tokens: The tokens in the batch; None stands for the whole batch as it is.
        common: vLLM's metadata of them, as its builders take it.
        metadata: What vLLM's builder made of that.
    """

    tokens: Tokens | None
    common: CommonAttentionMetadata
    metadata: Any = None


Part = StockPart | HeadwiseBatch | SparseBatch
"""Tokens of a batch and the call that computes them."""


class Sees(Protocol):
    """What is shown a step's queries: `StepQueries`, or what a graph leaves them in."""

    def see(self, layer_index: int, query: torch.Tensor) -> None:
        """Keeps the queries of a layer, `[num_tokens, num_heads, head_size]`."""


@dataclass
class Observation:
    """Tokens of a batch that their request's memory is to see.

    Attributes:
        memory: The memory.
        tokens: The tokens in the batch.
        first_position: Position of the first of them in the prompt.
        blocks: Block ids up to the last of them, int64.
    """

    memory: ObservingMemory
    tokens: slice
    first_position: int
    blocks: torch.Tensor

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.first_position + self.tokens.stop - self.tokens.start


@dataclass
class Completion:
    """A row that reaches a cut in this step.

    Attributes:
        drop: The cut.
        tokens: All tokens before the cut if they are in this batch: keys and values are at hand
            then and need not be read from the cache. Else None.
    """

    drop: Drop
    tokens: slice | None


@dataclass
class Split:
    """A batch in which something is dropped, or about to be, in the order in which it is computed.

    Attributes:
        before: Parts that read the cache as it is.
        observations: Tokens that memories see then.
        completions: Rows whose entries are scored, chosen and packed then.
        after: Parts that read what is retained.
        seen: What keeps the queries that drops will look through, or None.
        sparse: What takes the place of `before` in layers that prefill sparsely, or None.
        num_dense_layers: First layers in which nothing does.
    """

    before: list[Part]
    observations: list[Observation]
    completions: list[Completion]
    after: list[Part]
    seen: Sees | None = None
    sparse: list[Part] | None = None
    num_dense_layers: int = 0

    def before_in(self, layer_index: int) -> list[Part]:
        """Parts that read the cache as it is, in a layer."""
        if self.sparse is None or layer_index < self.num_dense_layers:
            return self.before
        return self.sparse

    @property
    def stock_parts(self) -> list[StockPart]:
        """Parts for which vLLM's builder has to make metadata."""
        return [p for p in (*self.before, *(self.sparse or ())) if isinstance(p, StockPart)]


class Splitter:
    """Splits the batches of one group of layers.

    Args:
        state: State of the group's layers.
        requests_of: Gives the requests of a batch.
        block_size: Tokens per block.
    """

    drop_class = Drop

    def __init__(self, state: RetentionState, requests_of: RequestsOf, block_size: int) -> None:
        self._state, self._requests_of, self._block_size = state, requests_of, block_size
        self._page_tables = PageTables(state, block_size)

    def split(self, common: CommonAttentionMetadata) -> Split | None:
        """Splits a batch, or returns None when all of it is vLLM's and nobody has to see it."""
        requests = self._requests_of(common)
        if all(request.plan.is_stock for request in requests):
            return None
        rows = self._rows(common, requests)
        past_cut = np.flatnonzero(rows.stock_lens < rows.query_lens)
        seen = self._seen_queries(rows, common.block_table_tensor.device)
        if not rows.stock_lens.any():
            return Split([], [], [], [self._headwise(rows, past_cut, common)], seen)
        observations = self._observations(rows, common.block_table_tensor)
        completions = self._completions(rows, common.block_table_tensor)
        sparse = self._sparse_rows(rows, common.block_table_tensor)
        if not (past_cut.size or observations or completions or seen or sparse):
            return None
        before, after = StockPart(None, common), list[Part]()
        if past_cut.size:
            before = stock_part(Pieces.before_cuts(rows), common)
            after = [self._headwise(rows, past_cut, common)]
        split = Split([before], observations, completions, after, seen)
        if sparse:
            split.sparse = self._sparse_parts(rows, sparse, common)
            # The same for all requests of a server.
            of_requests = (row.config.of(Prefill) for row in sparse.values())
            (split.num_dense_layers,) = {each.prefill_dense_layers for each in of_requests}
        return split

    def _border(self, request: Request) -> Cut | None:
        """The cut from which on a request's tokens read what is retained."""
        return request.border

    def _sparse_rows(self, rows: Rows, block_table: torch.Tensor) -> dict[int, SparseRow]:
        """Rows with sparse segments."""
        return sparse_rows(rows, block_table, self._block_size)

    def _sparse_parts(
        self, rows: Rows, sparse: dict[int, SparseRow], common: CommonAttentionMetadata
    ) -> list[Part]:
        """What is before the cuts: the sparse segments, and the tokens beside them."""
        parts: list[Part] = [
            sparse_batch(list(sparse.values()), common.max_seq_len, self._state.num_kv_heads)
        ]
        beside = Pieces.before_cuts(rows, sparse)
        return [stock_part(beside, common), *parts] if beside.rows.size else parts

    def _seen_queries(self, rows: Rows, device: torch.device) -> StepQueries | None:
        """The tokens whose queries the next cuts of their requests look through.

        Raises:
            RuntimeError: If a chunk goes on past a cut that is made before what follows it is
                computed; `CutScheduler` keeps it from happening.
        """
        wanted: list[tuple[Request, int, int, int]] = []  # request, first and last position, token
        for row, request in enumerate(rows.requests):
            begin, end = int(rows.num_computed[row]), int(rows.seq_lens[row])
            shift = int(rows.query_start[row]) - begin
            for cut in islice(request.plan.cuts, request.progress.num_made, None):
                if cut is not request.plan.cut_at_once and cut.position < end:
                    raise RuntimeError(
                        f"a chunk of {request.plan.settings.method} runs past a cut between steps"
                    )
                first, last = max(begin, request.first_query(cut)), min(end, cut.position)
                if first < last:
                    wanted.append((request, first, last, first + shift))
                # The next cut may follow so soon that its window begins in this step, too.
                if cut.position - request.plan.settings.window >= end:
                    break
        if not wanted:
            return None
        starts = np.array([token for _, _, _, token in wanted], dtype=np.int64)
        lens = np.array([last - first for _, first, last, _ in wanted], dtype=np.int64)
        tokens = on_device(token_indices(starts, lens), device)
        seen = StepQueries(tokens, self._state.num_choosing)
        place = 0
        for request, first, last, _ in wanted:
            request.progress.queries.keep(seen, place, first, last)
            place += last - first
        return seen

    def _headwise(
        self, rows: Rows, past_cut: np.ndarray, common: CommonAttentionMetadata
    ) -> HeadwiseBatch:
        """The tokens past their cuts, with page tables unless this step's choice makes them."""
        headwise = headwise_batch(rows, past_cut, common, self._state.num_kv_heads)
        if not rows.completing[past_cut].any():
            headwise.table = self._table_of(headwise.rows)
        return headwise

    def _rows(self, common: CommonAttentionMetadata, requests: list[Request]) -> Rows:
        """The rows of a batch, as far as the host knows them."""
        query_start = common.query_start_loc_cpu.numpy().astype(np.int64)
        seq_lens = self._seq_lens(common).numpy().astype(np.int64)
        borders = [self._border(request) for request in requests]
        cut_positions = [
            length if border is None else border.position
            for border, length in zip(borders, seq_lens, strict=True)
        ]
        return Rows(
            query_start=query_start[:-1],
            query_lens=np.diff(query_start),
            seq_lens=seq_lens,
            cut_positions=np.array(cut_positions, dtype=np.int64),
            requests=requests,
            borders=borders,
        )

    def _seq_lens(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Tokens of each request, exact as long as its cut is not reached."""
        return common.seq_lens

    def _table_of(self, rows: SettledRows) -> PageTable | None:
        """Page tables of rows whose state is complete, if the backend wants them now."""
        return self._page_tables.of(rows)

    def _completions(self, rows: Rows, block_table: torch.Tensor) -> list[Completion]:
        """Rows that reach a cut that is made in this step."""
        return [
            Completion(
                self._drop(rows, row, block_table[row]),
                rows.stock_tokens(row) if rows.num_computed[row] == 0 else None,
            )
            for row in map(int, np.flatnonzero(rows.completing))
        ]

    def _drop(self, rows: Rows, row: int, block_ids: torch.Tensor) -> Drop:
        """A request's cut, made once however often the batch is split.

        Raises:
            RuntimeError: If the chunk of a pooled request goes on past the cut. A layer would have
                to read what only the last one decides; `CutScheduler` keeps it from happening.
        """
        request, cut = rows.requests[row], rows.borders[row]
        assert cut is not None
        if request.method.pooled and rows.seq_lens[row] > cut.position:
            raise RuntimeError(f"a chunk of {request.plan.settings.method} runs past its cut")
        drop = request.progress.drop
        if drop is None:
            blocks = block_ids[: -(-cut.position // self._block_size)].to(torch.int64)
            columns = Columns.of_prompt(blocks, cut.position, self._state)
            packed, waits = blocks[cut.first_packed : cut.tail_start], self._may_wait(rows, row)
            drop = self.drop_class(request, columns, packed, self._state, self._block_size, waits)
            request.progress.drop = drop
        assert isinstance(drop, Drop)
        return drop

    def _may_wait(self, rows: Rows, row: int) -> bool:
        """Whether nobody reads what a request retains before the next step.

        A context is read by others: it is packed even if its own request ends here.
        """
        is_context = rows.requests[row].plan.has_context
        return not is_context and bool(rows.seq_lens[row] == rows.cut_positions[row])

    def _observations(self, rows: Rows, block_table: torch.Tensor) -> list[Observation]:
        """Tokens before cuts, where the requests' methods remember something of each."""
        return [
            self._observation(rows, int(row), block_table[row])
            for row in np.flatnonzero(rows.stock_lens)
            if rows.num_computed[row] < rows.requests[row].num_observed
            and rows.requests[row].method.scorer.observes
        ]

    def _observation(self, rows: Rows, row: int, block_ids: torch.Tensor) -> Observation:
        memory = rows.requests[row].remembered_by(self._state.num_choosing)
        assert isinstance(memory, ObservingMemory)
        tokens, num_computed = rows.stock_tokens(row), int(rows.num_computed[row])
        end = min(num_computed + tokens.stop - tokens.start, memory.num_tokens)
        blocks = block_ids[: -(-end // self._block_size)].to(torch.int64)
        shown = slice(tokens.start, tokens.start + end - num_computed)
        return Observation(memory, shown, num_computed, blocks)


def stock_part(pieces: Pieces, common: CommonAttentionMetadata) -> StockPart:
    """Cuts a batch down to some of its tokens, which vLLM's own call computes."""
    lens, bounds = pieces.lens, pieces.ends.astype(np.int32)
    locations, device = start_loc(lens), common.block_table_tensor.device
    indices = async_tensor_h2d(pieces.rows, device)
    seq_lens = common.seq_lens.index_select(0, indices)
    part = common.replace(
        query_start_loc=async_tensor_h2d(locations, device),
        query_start_loc_cpu=torch.from_numpy(locations),
        seq_lens=torch.minimum(seq_lens, async_tensor_h2d(bounds, device)),
        seq_lens_cpu_upper_bound=torch.from_numpy(bounds),
        num_reqs=len(lens),
        num_actual_tokens=int(lens.sum()),
        max_query_len=int(lens.max()),
        max_seq_len=int(bounds.max(initial=0)),
        block_table_tensor=common.block_table_tensor.index_select(0, indices),
    )
    return StockPart(on_device(token_indices(pieces.starts, lens), device), part)
