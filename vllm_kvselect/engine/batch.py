"""Splits a batch of vLLM into what its own kernel computes and what the one-head view computes.

A chunk is split at its request's cut: up to there vLLM's attention reads the whole cache, beyond
it the tokens read the retained entries only. Rows without a cut stay vLLM's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvselect.compaction import head_pages, packed_slots
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.headwise_batch import HeadwiseBatch, headwise_batch
from vllm_kvselect.engine.page_tables import PageTables, SettledRows
from vllm_kvselect.engine.pool import KeptCandidates
from vllm_kvselect.engine.prompts import Prompt, PromptsOf
from vllm_kvselect.engine.rows import (
    Rows,
    Tokens,
    on_device,
    start_loc,
    token_indices,
)
from vllm_kvselect.engine.state import RetentionState
from vllm_kvselect.engine.whole_prompt import PromptChunk, prompt_chunk
from vllm_kvselect.methods import METHODS
from vllm_kvselect.page_table import PageTable
from vllm_kvselect.retention import Cut


@dataclass
class Completion:
    """A row whose prompt is complete in this step: its entries are to be selected and packed.

    Attributes:
        eviction: The request's own configuration.
        cut: The cut that is made.
        block_size: Tokens per block.
        blocks: Block ids of the whole prompt, int64.
        pages: Pages of the whole prompt, `[num_kv_heads, num_blocks]` int64.
        competing_pages: Those before the tail.
        first_packed_block: Id of the first packed block, the key of the state; where block tables
            live on a device, `[1]` int64 on it.
        slots: Where the retained entries go, in the one-head view of the cache, int64.
        prompt_tokens: The prompt's tokens of this batch if they are all of it: keys and values are
            at hand then and need not be read from the cache. Else None.
        window_tokens: Tokens of this batch that belong to the observation window.
        earlier_queries: Queries of the window's first tokens from earlier chunks,
            `[num_layers, n, num_heads, head_size]`, or None.
        sums: Scores of the whole prompt, `[num_layers, num_kv_heads, num_prompt_tokens]`, for the
            methods that sum them up chunk by chunk; else None.
        is_pooled: Whether the layers share the packed pages.
        later: Where a layer leaves what can wait for the next step: its part of the choice that
            the answer's first token does not depend on. None if nothing can.
        kept: Where it leaves its candidates then, or if it shares the packed pages.
    """

    eviction: EvictionConfig
    cut: Cut
    block_size: int
    blocks: torch.Tensor
    pages: torch.Tensor
    competing_pages: torch.Tensor
    first_packed_block: int | torch.Tensor
    slots: torch.Tensor
    prompt_tokens: slice | None
    window_tokens: slice
    earlier_queries: torch.Tensor | None
    sums: torch.Tensor | None
    is_pooled: bool
    later: list[Callable[[], None]] | None
    kept: KeptCandidates | None


@dataclass
class PartialWindow:
    """A chunk that ends inside a prompt's observation window: its queries there are kept.

    Attributes:
        queries: Where they go, `[num_layers, n, num_heads, head_size]`.
        tokens: Which tokens of the batch they are.
    """

    queries: torch.Tensor
    tokens: slice


@dataclass
class Split:
    """A batch in which something is dropped, or about to be.

    Attributes:
        stock: The part that vLLM's own call computes, or None if there is none.
        stock_tokens: Its tokens; None stands for the whole batch as it is.
        prompt_chunks: Chunks to add to their prompts' sums after that call.
        completions: Rows to select and pack then.
        partial_windows: Queries to keep for a later chunk.
        headwise: Tokens that read retained entries, computed last, or None.
    """

    stock: CommonAttentionMetadata | None
    stock_tokens: Tokens | None
    prompt_chunks: list[PromptChunk]
    completions: list[Completion]
    partial_windows: list[PartialWindow]
    headwise: HeadwiseBatch | None


class Splitter:
    """Splits the batches of one group of layers.

    Args:
        window: Length of the observation window, the same for all requests.
        state: State of the group's layers.
        prompts_of: Gives the prompts of a batch.
        block_size: Tokens per block.
        num_kv_heads: KV heads on this rank.
        query_shape: Shape of one token's queries, `(num_heads, head_size)`.
        dtype: Data type of the queries.
    """

    def __init__(
        self,
        window: int,
        state: RetentionState,
        prompts_of: PromptsOf,
        block_size: int,
        num_kv_heads: int,
        query_shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        self._window, self._state, self._prompts_of = window, state, prompts_of
        self._block_size, self._num_kv_heads = block_size, num_kv_heads
        self._query_shape, self._dtype = query_shape, dtype
        self._page_tables = PageTables(state, block_size)

    def split(self, common: CommonAttentionMetadata) -> Split | None:
        """Splits a batch, or returns None when nobody in it drops anything in this step."""
        prompts = self._prompts_of(common)
        if all(prompt.cut is None for prompt in prompts):
            return None
        rows = self._rows(common, prompts)
        stock_lens = rows.stock_lens
        settled = np.flatnonzero(stock_lens < rows.query_lens)
        if not stock_lens.any():
            return Split(None, None, [], [], [], self._headwise(rows, settled, common))
        block_table = common.block_table_tensor
        windows = self._partial_windows(rows)
        chunks = self._prompt_chunks(rows, block_table)
        completing = np.flatnonzero(rows.completing)
        if not (completing.size or settled.size or windows or chunks):
            return None
        completions = [self._completion(rows, int(row), block_table) for row in completing]
        if not settled.size:
            return Split(common, None, chunks, completions, windows, None)
        headwise = self._headwise(rows, settled, common)
        stock, stock_tokens = stock_part(rows, common)
        return Split(stock, stock_tokens, chunks, completions, windows, headwise)

    def _headwise(
        self, rows: Rows, settled: np.ndarray, common: CommonAttentionMetadata
    ) -> HeadwiseBatch:
        """The tokens past their prompts, with page tables unless this step's choice makes them."""
        headwise = headwise_batch(rows, settled, common, self._num_kv_heads)
        if not rows.completing[settled].any():
            headwise.table = self._table_of(headwise.rows)
        return headwise

    def _rows(self, common: CommonAttentionMetadata, prompts: list[Prompt]) -> Rows:
        """The rows of a batch, as far as the host knows them."""
        query_start = common.query_start_loc_cpu.numpy().astype(np.int64)
        seq_lens = self._seq_lens(common).numpy().astype(np.int64)
        cut_positions = [
            length if prompt.cut is None else prompt.cut.position
            for prompt, length in zip(prompts, seq_lens, strict=True)
        ]
        return Rows(
            query_start=query_start[:-1],
            query_lens=np.diff(query_start),
            seq_lens=seq_lens,
            cut_positions=np.array(cut_positions, dtype=np.int64),
            prompts=prompts,
        )

    def _seq_lens(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Tokens of each request, exact as long as its prompt is not complete."""
        return common.seq_lens

    def _block_id(self, blocks: torch.Tensor, index: int) -> int | torch.Tensor:
        """Id of one of a request's blocks."""
        return int(blocks[index])

    def _table_of(self, rows: SettledRows) -> PageTable | None:
        """Page tables of rows whose state is complete, if the backend wants them now."""
        return self._page_tables.of(rows)

    def _completion(self, rows: Rows, row: int, block_table: torch.Tensor) -> Completion:
        prompt = rows.prompts[row]
        cut, window = prompt.cut, self._window
        assert cut is not None
        blocks = block_table[row, : -(-cut.position // self._block_size)].to(torch.int64)
        start = int(rows.query_start[row])
        end = start + int(rows.stock_lens[row])
        num_computed = int(rows.num_computed[row])
        pages = head_pages(blocks, self._num_kv_heads)
        num_earlier = num_computed - (cut.position - window)
        earlier = self._state.window(prompt, num_earlier)
        self._state.close_window(prompt)
        is_pooled, waits = self._is_pooled(rows, row), self._may_wait(rows, row)
        if waits:
            prompt.packing.append(partial(self._state.complete, prompt))
        else:
            self._state.complete(prompt)
        sums, prompt.sums = prompt.sums, None
        return Completion(
            eviction=prompt.eviction,
            cut=cut,
            block_size=self._block_size,
            blocks=blocks,
            pages=pages,
            competing_pages=pages[:, : cut.tail_start].contiguous(),
            first_packed_block=self._block_id(blocks, cut.first_packed),
            slots=packed_slots(
                blocks[cut.first_packed : cut.tail_start],
                self._num_kv_heads,
                self._block_size,
            ),
            prompt_tokens=slice(start, end) if num_computed == 0 else None,
            window_tokens=slice(max(start, end - window), end),
            earlier_queries=earlier.queries[:, :num_earlier] if earlier else None,
            sums=sums,
            is_pooled=is_pooled,
            later=prompt.packing if waits else None,
            kept=KeptCandidates(self._state.num_layers) if waits or is_pooled else None,
        )

    def _may_wait(self, rows: Rows, row: int) -> bool:
        """Whether nobody reads what a request retains before the next step."""
        return bool(rows.seq_lens[row] == rows.cut_positions[row])

    def _is_pooled(self, rows: Rows, row: int) -> bool:
        """Whether the layers of a request share its packed pages.

        Raises:
            RuntimeError: If the chunk goes on past the cut. A layer would have to read what only
                the last one decides; `PoolScheduler` keeps it from happening.
        """
        prompt = rows.prompts[row]
        if not METHODS[prompt.eviction.method].pooled:
            return False
        if rows.seq_lens[row] > rows.cut_positions[row]:
            raise RuntimeError(f"a chunk of {prompt.eviction.method} runs past its cut")
        return True

    def _prompt_chunks(self, rows: Rows, block_table: torch.Tensor) -> list[PromptChunk]:
        """Chunks of the prompts whose methods need the queries of all their tokens."""
        chunks = []
        for row in np.flatnonzero(rows.stock_lens):
            prompt = rows.prompts[row]
            if prompt.cut is None:
                continue
            start, num_tokens = int(rows.query_start[row]), int(rows.stock_lens[row])
            first = int(rows.num_computed[row])
            blocks = block_table[row, : -(-(first + num_tokens) // self._block_size)]
            chunk = prompt_chunk(
                prompt,
                slice(start, start + num_tokens),
                first,
                blocks.to(torch.int64),
                self._state.num_layers,
                self._num_kv_heads,
            )
            if chunk is not None:
                chunks.append(chunk)
        return chunks

    def _partial_windows(self, rows: Rows) -> list[PartialWindow]:
        """Chunks that end after the window's first token and before the prompt's last."""
        window_start = rows.cut_positions - self._window
        is_inside = (rows.seq_lens > window_start) & (rows.seq_lens < rows.cut_positions)
        found = [
            self._partial_window(rows, row, int(window_start[row]))
            for row in np.flatnonzero(is_inside)
            if rows.prompts[row].cut is not None
        ]
        return [window for window in found if window is not None]

    def _partial_window(self, rows: Rows, row: int, window_start: int) -> PartialWindow | None:
        num_computed, seq_len = int(rows.num_computed[row]), int(rows.seq_lens[row])
        prompt = rows.prompts[row]
        if num_computed <= window_start:
            shape = (self._state.num_layers, self._window, *self._query_shape)
            self._state.open_window(prompt, shape, self._dtype)
        first = max(0, num_computed - window_start)
        window = self._state.window(prompt, first)
        if window is None:
            return None
        num_new = seq_len - window_start - first
        window.num_filled = first + num_new
        end = int(rows.query_start[row] + rows.query_lens[row])
        return PartialWindow(window.queries[:, first : first + num_new], slice(end - num_new, end))


def stock_part(
    rows: Rows, common: CommonAttentionMetadata
) -> tuple[CommonAttentionMetadata, Tokens]:
    """Cuts a batch down to the tokens that vLLM's own call computes, and says which they are."""
    lens = rows.stock_lens
    kept = np.flatnonzero(lens)
    bounds = np.minimum(rows.seq_lens, rows.cut_positions)[kept].astype(np.int32)
    locations, device = start_loc(lens[kept]), common.block_table_tensor.device
    indices = async_tensor_h2d(kept, device)
    seq_lens = common.seq_lens.index_select(0, indices)
    part = common.replace(
        query_start_loc=async_tensor_h2d(locations, device),
        query_start_loc_cpu=torch.from_numpy(locations),
        seq_lens=torch.minimum(seq_lens, async_tensor_h2d(bounds, device)),
        seq_lens_cpu_upper_bound=torch.from_numpy(bounds),
        num_reqs=len(kept),
        num_actual_tokens=int(lens.sum()),
        max_query_len=int(lens.max()),
        max_seq_len=int(bounds.max(initial=0)),
        block_table_tensor=common.block_table_tensor.index_select(0, indices),
    )
    return part, on_device(token_indices(rows.query_start[kept], lens[kept]), device)
