"""Splits a batch into parts: what vLLM's own call computes, and what the one-head view does.

A row whose request has made a cut reads what it retains. All others stay vLLM's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvselect.config import Prefill
from vllm_kvselect.engine.drop.request import Request, RequestsOf
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.engine.sparse.worker_segments import (
    SparseBatch,
    SparseRow,
    sparse_batch,
    sparse_rows,
)
from vllm_kvselect.engine.view.page_tables import PageTables, SettledRows
from vllm_kvselect.engine.view.rows import Rows, Tokens, on_device, start_loc, token_indices
from vllm_kvselect.engine.view.sequences import HeadwiseBatch, headwise_batch
from vllm_kvselect.paging.page_table import PageTable
from vllm_kvselect.scoring.memory import StepQueries


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


NEVER = np.iinfo(np.int64).max
"""A position that no request comes to."""

Part = StockPart | HeadwiseBatch | SparseBatch
"""Tokens of a batch and the call that computes them."""


class Sees(Protocol):
    """What is shown a step's queries: `Seen`, or what a graph leaves them in."""

    def see(self, layer_index: int, query: torch.Tensor) -> None:
        """Keeps the queries of a layer, `[num_tokens, num_heads, head_size]`."""


class Seen(NamedTuple):
    """The tokens of a batch whose queries later cuts look through.

    Attributes:
        queries: What they are kept in.
        of_requests: Each request with the positions of the first of its tokens and after the last.
    """

    queries: StepQueries
    of_requests: list[tuple[Request, int, int]]

    def see(self, layer_index: int, query: torch.Tensor) -> None:
        """Keeps the queries of a layer, `[num_tokens, num_heads, head_size]`."""
        self.queries.see(layer_index, query)

    def keep(self) -> None:
        """Lets the requests know where their queries will be."""
        place = 0
        for request, begin, end in self.of_requests:
            request.progress.queries.keep(self.queries, place, begin, end)
            place += end - begin


@dataclass
class Split:
    """A batch of which some tokens read what is retained, or are looked at.

    Attributes:
        parts: The calls that compute it.
        seen: What keeps the queries that cuts will look through, or None.
        sparse: What takes the place of `parts` in layers that prefill sparsely, or None.
        sparse_layers: The layers in which it does.
    """

    parts: list[Part]
    seen: Sees | None = None
    sparse: list[Part] | None = None
    sparse_layers: range = range(0)

    def parts_in(self, layer_index: int) -> list[Part]:
        """The calls that compute it in a layer."""
        if self.sparse is None or layer_index not in self.sparse_layers:
            return self.parts
        return self.sparse

    @property
    def stock_parts(self) -> list[StockPart]:
        """Parts for which vLLM's builder has to make metadata."""
        return [p for p in (*self.parts, *(self.sparse or ())) if isinstance(p, StockPart)]


class Decodes(NamedTuple):
    """What the host knows of a batch of one token a row: one object while nothing of it changes.

    Attributes:
        version: Of the state.
        serials: Of the progress of each row's request: where this is another one, so is the row.
        cuts: The first packed block and the first of the tail of each row's last cut, `[2, n]`
            int32; 0 without one.
        seen_from: Position of the first query that a later cut of the row looks through, `[n]`
            int64.
    """

    version: int
    serials: list[int]
    cuts: np.ndarray
    seen_from: np.ndarray

    @classmethod
    def of(cls, requests: list[Request], version: int) -> Self:
        """What is known of requests at a version of the state."""
        made = [request.last_cut for request in requests]
        to_come = [(request, request.next_cut) for request in requests]
        cuts = [(0, 0) if cut is None else (cut.first_packed, cut.tail_start) for cut in made]
        seen_from = [NEVER if cut is None else row.first_query(cut) for row, cut in to_come]
        return cls(
            version,
            [request.progress.serial for request in requests],
            np.array(cuts, dtype=np.int32).T,
            np.array(seen_from, dtype=np.int64),
        )


class Pieces(NamedTuple):
    """Tokens of rows that read all tokens before them, as numpy arrays `[num_pieces]`.

    Attributes:
        rows: The row of each piece, in order.
        starts: Where its tokens start in the batch.
        lens: How many they are, at least 1.
        ends: Position after the last of them.
    """

    rows: np.ndarray
    starts: np.ndarray
    lens: np.ndarray
    ends: np.ndarray

    @classmethod
    def before_cuts(cls, rows: Rows, sparse: Mapping[int, SparseRow] | None = None) -> Self:
        """The rows whose tokens come before their first cut.

        Sparse segments are left out; what is beside them may be two pieces.
        """
        pieces = []
        for row in np.flatnonzero(~rows.is_past):
            tokens = rows.tokens(row)
            spans = [(tokens.start, tokens.stop)]
            if sparse and row in sparse:
                left_out = sparse[row].tokens
                spans = [(tokens.start, left_out.start), (left_out.stop, tokens.stop)]
            shift = rows.num_computed[row] - rows.query_start[row]
            for start, stop in spans:
                if start < stop:
                    pieces.append((row, start, stop - start, stop + shift))
        return cls(*np.array(pieces, dtype=np.int64).reshape(-1, 4).T)


class Splitter:
    """Splits the batches of one group of layers.

    Attributes:
        chooses: Whether its layers choose anything: else nothing is seen, and no segment is sparse.
    """

    chooses = True

    def __init__(self, state: RetentionState, requests_of: RequestsOf, page_size: int) -> None:
        self._state, self._requests_of, self._page_size = state, requests_of, page_size
        self._page_tables = PageTables(state, page_size)

    def split(self, common: CommonAttentionMetadata) -> Split | None:
        """Splits a batch, or returns None when all of it is vLLM's and nobody has to see it."""
        requests = self._requests_of(common)
        if all(request.plan.is_stock for request in requests):
            return None
        rows = self._rows(common, requests)
        past, seen = np.flatnonzero(rows.is_past), self._seen(rows, requests)
        after: list[Part] = []
        if past.size:
            headwise = headwise_batch(rows, past, common, self._state.num_kv_heads)
            headwise.table = self._table_of(headwise.rows)
            after.append(headwise)
        if past.size == len(requests):
            return Split(after, seen)
        prefills = [request.progress.sparse for request in requests] if self.chooses else []
        sparse = sparse_rows(rows, prefills, common.block_table_tensor, self._page_size)
        if not (past.size or seen or sparse):
            return None
        before = StockPart(None, common)
        if past.size:
            before = stock_part(Pieces.before_cuts(rows), common)
        split = Split([before, *after], seen)
        if sparse:
            split.sparse = [*self._sparse_parts(rows, sparse, common), *after]
            # The same for all requests of a server.
            of_requests = (row.prefill.config.of(Prefill) for row in sparse.values())
            (num_dense,) = {each.prefill_dense_layers for each in of_requests}
            # A drafter's layers may be computed with this batch, too.
            split.sparse_layers = range(num_dense, self._state.num_choosing)
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

    def _seen(self, rows: Rows, requests: Sequence[Request]) -> Seen | None:
        """The tokens whose queries the next cuts of their requests look through.

        Raises:
            RuntimeError: If a chunk goes on past a cut, which is made before what follows it is
                computed; `CutScheduler` keeps it from happening.
        """
        if not self.chooses:
            return None
        wanted: list[tuple[Request, int, int]] = []
        starts: list[int] = []
        for row, request in enumerate(requests):
            begin, end = int(rows.num_computed[row]), int(rows.seq_lens[row])
            for cut in islice(request.plan.cuts, request.progress.num_made, None):
                if cut.position < end:
                    raise RuntimeError(
                        f"a chunk of {request.plan.settings.method} runs past a cut between steps"
                    )
                first, last = max(begin, request.first_query(cut)), min(end, cut.position)
                if first < last:
                    wanted.append((request, first, last))
                    starts.append(int(rows.query_start[row]) + first - begin)
                # The next cut may follow so soon that its window begins in this step, too.
                if cut.position - request.plan.settings.window >= end:
                    break
        if not wanted:
            return None
        lens = np.array([last - first for _, first, last in wanted], dtype=np.int64)
        indices = token_indices(np.array(starts, dtype=np.int64), lens)
        tokens = on_device(indices, self._state.offsets.device)
        return Seen(StepQueries(tokens, self._state.num_choosing), wanted)

    def _rows(self, common: CommonAttentionMetadata, requests: list[Request]) -> Rows:
        """The rows of a batch, as far as the host knows them."""
        query_start = common.query_start_loc_cpu.numpy().astype(np.int64)
        return Rows(
            query_start=query_start[:-1],
            query_lens=np.diff(query_start),
            seq_lens=self._seq_lens(common).numpy().astype(np.int64),
            cuts=[request.last_cut for request in requests],
        )

    def _seq_lens(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Tokens of each request, exact as long as its cuts are not made."""
        return common.seq_lens

    def _table_of(self, rows: SettledRows) -> PageTable | None:
        """Page tables of rows, if the backend wants them now."""
        return self._page_tables.of(rows)


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


class DraftSplitter(Splitter):
    """Splits the batches of a drafter, whose layers lie in the group of its target's.

    It reads what is packed, and everything of requests that have nothing packed yet. It chooses
    nothing, so nothing of it is seen.

    A drafter is computed once the step's tokens are sampled, several times over. Its first batch
    has the step's tokens, each further one a drafted token of every request. It asks for metadata
    itself, but for the first batch of EAGLE and MTP in model runner V2, which is the step's.
    """

    chooses = False

    def _seq_lens(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Bounds: what vLLM says of a drafter's rows on the host may be too little by its token."""
        return torch.full((common.num_reqs,), common.max_seq_len, dtype=torch.int32)
