"""Splits a batch into parts: what vLLM's own call computes, and what the one-head view does.

A chunk is split at its request's cut: up to there vLLM's attention reads the whole cache, beyond
it the tokens read the retained entries only. Rows without a cut stay vLLM's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvselect.engine.step.packing import Packing
from vllm_kvselect.engine.step.page_tables import PageTables, SettledRows
from vllm_kvselect.engine.step.pieces import Pieces, sparse_batch, sparse_rows
from vllm_kvselect.engine.step.request import Request, RequestsOf
from vllm_kvselect.engine.step.rows import Rows, Tokens, on_device, start_loc, token_indices
from vllm_kvselect.engine.step.seen_queries import SeenQueries, SeenQuery, Sees
from vllm_kvselect.engine.step.sequences import HeadwiseBatch, headwise_batch
from vllm_kvselect.engine.step.sparse import SparseBatch, SparseRow
from vllm_kvselect.engine.step.state import RetentionState
from vllm_kvselect.paging.page_table import PageTable
from vllm_kvselect.scoring.observer import Observer


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


@dataclass
class Observation:
    """Tokens of a batch that their request's observer is to see.

    Attributes:
        observer: The observer.
        tokens: The tokens in the batch.
        first_position: Position of the first of them in the prompt.
        blocks: Block ids up to the last of them, int64.
    """

    observer: Observer
    tokens: slice
    first_position: int
    blocks: torch.Tensor

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.first_position + self.tokens.stop - self.tokens.start


@dataclass
class Completion:
    """A row that reaches its cut in this step.

    Attributes:
        packing: The cut.
        tokens: All tokens before the cut if they are in this batch: keys and values are at hand
            then and need not be read from the cache. Else None.
    """

    packing: Packing
    tokens: slice | None


@dataclass
class Split:
    """A batch in which something is dropped, or about to be, in the order in which it is computed.

    Attributes:
        before: Parts that read the cache as it is.
        observations: Tokens that observers see then.
        completions: Rows whose entries are scored, chosen and packed then.
        after: Parts that read what is retained.
        seen: What keeps the queries that rounds will look through, or None.
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
        make_round: Makes the round of a request that is due before the batch is computed, or adds
            up what later ones need; from the request's block table.
    """

    def __init__(
        self,
        state: RetentionState,
        requests_of: RequestsOf,
        block_size: int,
        make_round: Callable[[Request, torch.Tensor], None],
    ) -> None:
        self._state, self._requests_of, self._block_size = state, requests_of, block_size
        self._make_round = make_round
        self._page_tables = PageTables(state, block_size)

    def split(self, common: CommonAttentionMetadata) -> Split | None:
        """Splits a batch, or returns None when all of it is vLLM's and nobody has to see it."""
        requests = self._requests_of(common)
        if not any(request.cuts or request.segments for request in requests):
            return None
        self._make_rounds(requests, common.block_table_tensor)
        rows = self._rows(common, requests)
        past_cut = np.flatnonzero(rows.stock_lens < rows.query_lens)
        seen = self._seen_queries(rows, common.block_table_tensor.device)
        if not rows.stock_lens.any():
            return Split([], [], [], [self._headwise(rows, past_cut, common)], seen)
        observations = self._observations(rows, common.block_table_tensor)
        completions = self._completions(rows, common.block_table_tensor)
        sparse = sparse_rows(rows, common.block_table_tensor, self._block_size)
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
            (split.num_dense_layers,) = {r.config.prefill_dense_layers for r in sparse.values()}
        return split

    def _sparse_parts(
        self, rows: Rows, sparse: dict[int, SparseRow], common: CommonAttentionMetadata
    ) -> list[Part]:
        """What is before the cuts: the sparse segments, and the tokens beside them."""
        parts: list[Part] = [
            sparse_batch(list(sparse.values()), common.max_seq_len, self._state.num_kv_heads)
        ]
        beside = Pieces.before_cuts(rows, sparse)
        return [stock_part(beside, common), *parts] if beside.rows.size else parts

    def _make_rounds(self, requests: Sequence[Request], block_table: torch.Tensor) -> None:
        """Makes or prepares the rounds of requests, before anything of the batch is computed."""
        for row, request in enumerate(requests):
            if request.due_round is not None or request.is_behind:
                self._make_round(request, block_table[row])

    def _seen_queries(self, rows: Rows, device: torch.device) -> SeenQueries | None:
        """The tokens whose queries the next rounds of their requests look through.

        Raises:
            RuntimeError: If a chunk goes on past a round, which is made before what follows it is
                computed; `CutScheduler` keeps it from happening.
        """
        kept: list[tuple[Request, int, int]] = []  # request, position, token
        num_computed = rows.num_computed
        for row, request in enumerate(rows.requests):
            if (cut := request.next_round) is None:
                continue
            first = max(int(num_computed[row]), request.first_seen(cut))
            shift = int(rows.query_start[row] - num_computed[row])
            last = int(rows.seq_lens[row])
            if last > cut.position:
                raise RuntimeError(f"a chunk of {request.eviction.method} runs past its round")
            kept += [(request, position, position + shift) for position in range(first, last)]
        if not kept:
            return None
        seen = SeenQueries(
            on_device(np.array([token for _, _, token in kept]), device), self._state.num_layers
        )
        for place, (request, position, _) in enumerate(kept):
            request.seen[position] = SeenQuery(seen, place)
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
        cut_positions = [
            length if request.cut is None else request.cut.position
            for request, length in zip(requests, seq_lens, strict=True)
        ]
        return Rows(
            query_start=query_start[:-1],
            query_lens=np.diff(query_start),
            seq_lens=seq_lens,
            cut_positions=np.array(cut_positions, dtype=np.int64),
            requests=requests,
        )

    def _seq_lens(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Tokens of each request, exact as long as its cut is not reached."""
        return common.seq_lens

    def _block_id(self, blocks: torch.Tensor, index: int) -> int | torch.Tensor:
        """Id of one of a request's blocks."""
        return int(blocks[index])

    def _table_of(self, rows: SettledRows) -> PageTable | None:
        """Page tables of rows whose state is complete, if the backend wants them now."""
        return self._page_tables.of(rows)

    def _completions(self, rows: Rows, block_table: torch.Tensor) -> list[Completion]:
        """Rows that reach their cut in this step."""
        return [
            Completion(
                self._packing(rows, row, block_table[row]),
                rows.stock_tokens(row) if rows.num_computed[row] == 0 else None,
            )
            for row in map(int, np.flatnonzero(rows.completing))
        ]

    def _packing(self, rows: Rows, row: int, block_ids: torch.Tensor) -> Packing:
        """A request's cut, made once however often the batch is split.

        Raises:
            RuntimeError: If the chunk of a pooled request goes on past the cut. A layer would have
                to read what only the last one decides; `CutScheduler` keeps it from happening.
        """
        request, waits = rows.requests[row], self._may_wait(rows, row)
        assert request.cut is not None
        if request.method.pooled and rows.seq_lens[row] > request.cut.position:
            raise RuntimeError(f"a chunk of {request.eviction.method} runs past its cut")
        if request.packing is None:
            blocks = block_ids[: -(-request.cut.position // self._block_size)].to(torch.int64)
            first_packed = self._block_id(blocks, request.cut.first_packed)
            request.packing = Packing(
                request, self._state, blocks, first_packed, self._block_size, waits
            )
        assert isinstance(request.packing, Packing)
        return request.packing

    def _may_wait(self, rows: Rows, row: int) -> bool:
        """Whether nobody reads what a request retains before the next step.

        A context is read by others: it is packed even if its own request ends here.
        """
        is_context = rows.requests[row].eviction.context is not None
        return not is_context and bool(rows.seq_lens[row] == rows.cut_positions[row])

    def _observations(self, rows: Rows, block_table: torch.Tensor) -> list[Observation]:
        """Tokens before cuts, as far as the requests' methods have to see them."""
        found = (
            self._observation(rows, int(row), block_table[row])
            for row in np.flatnonzero(rows.stock_lens)
            if rows.num_computed[row] < rows.requests[row].num_observed
        )
        return [observation for observation in found if observation is not None]

    def _observation(self, rows: Rows, row: int, block_ids: torch.Tensor) -> Observation | None:
        observer = rows.requests[row].observed_by(self._state.num_layers)
        tokens, num_computed = rows.stock_tokens(row), int(rows.num_computed[row])
        end = min(num_computed + tokens.stop - tokens.start, observer.num_tokens)
        first = max(num_computed, observer.first_position)
        if first >= end:
            return None
        blocks = block_ids[: -(-end // self._block_size)].to(torch.int64)
        shift = tokens.start - num_computed
        return Observation(observer, slice(first + shift, end + shift), first, blocks)


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
