"""Splits a batch of vLLM into what its own kernel computes and what the one-head view computes.

A request's chunk is cut at the end of its prompt: up to there vLLM's attention reads the whole
cache, beyond it the tokens read the retained entries only. Rows without a plan stay vLLM's.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm_kvselect.page_table import PageTable, headwise_page_table
from vllm_kvselect.retention import RetentionPlan

Tokens = slice | torch.Tensor
"""Token indices into a batch: a slice where they are consecutive, so that nothing is copied."""


class Rows(NamedTuple):
    """The rows of a batch, as numpy arrays `[num_reqs]`.

    Attributes:
        query_start: Where each row's tokens start in the batch.
        query_lens: Tokens of the row in this step.
        seq_lens: Tokens of the request after this step.
        prompt_lens: Prompt lengths; the sequence length for rows without a plan, so that all their
            tokens count as prompt.
        plans: Retention plan of each row, or None.
    """

    query_start: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray
    prompt_lens: np.ndarray
    plans: list[RetentionPlan | None]

    @property
    def num_computed(self) -> np.ndarray:
        """Tokens computed before this step."""
        return self.seq_lens - self.query_lens

    @property
    def stock_lens(self) -> np.ndarray:
        """Tokens of each row that vLLM's own kernel computes: those of the prompt."""
        return (np.minimum(self.seq_lens, self.prompt_lens) - self.num_computed).clip(0)

    @property
    def completing(self) -> np.ndarray:
        """Rows whose chunk reaches the end of a prompt that drops entries, bool."""
        planned = np.array([plan is not None for plan in self.plans], dtype=bool)
        return planned & (self.stock_lens > 0) & (self.seq_lens >= self.prompt_lens)


@dataclass
class Completion:
    """A row whose prompt is complete in this step: its entries are to be selected and packed.

    Attributes:
        plan: The retention plan.
        blocks: Block ids of the whole prompt, int64.
        first_packed_block: Id of the first packed block, the key of the state.
        num_prompt_tokens: Length of the prompt.
        window_tokens: Tokens of this batch that belong to the observation window.
        earlier_queries: Queries of the window's first tokens from earlier chunks,
            `[num_layers, n, num_heads, head_size]`, or None.
    """

    plan: RetentionPlan
    blocks: torch.Tensor
    first_packed_block: int
    num_prompt_tokens: int
    window_tokens: slice
    earlier_queries: torch.Tensor | None


@dataclass
class HeadwiseBatch:
    """Tokens past their prompts, as sequences of a one-head cache, one per (row, KV head).

    Attributes:
        queries: Indices of `(token, KV head)` pairs of the batch, sequence by sequence.
        query_start_loc: `[num_rows * num_kv_heads + 1]` int32.
        block_table: `[num_rows, max_num_blocks]`.
        seq_lens: `[num_rows]`.
        first_packed: `[num_rows]` int64.
        tail_start: `[num_rows]` int64.
        first_packed_blocks: `[num_rows]` int64, the keys of the state.
        table: Page tables of all layers, or None if a row's pages are only known after this
            step's selection.
    """

    queries: Tokens
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    first_packed: torch.Tensor
    tail_start: torch.Tensor
    first_packed_blocks: torch.Tensor
    table: PageTable | None

    def page_table(self, offsets: torch.Tensor, block_size: int) -> PageTable:
        """Page tables for the offsets of some layers, `[num_blocks, num_layers, num_heads + 1]`."""
        return headwise_page_table(
            self.block_table,
            self.seq_lens,
            self.first_packed,
            self.tail_start,
            offsets[self.first_packed_blocks].transpose(0, 1),
            block_size,
        )


def token_indices(starts: np.ndarray, lens: np.ndarray) -> Tokens:
    """Concatenates the ranges `start .. start + len`; a slice if they join without a gap."""
    if len(starts) and np.array_equal(starts[1:], (starts + lens)[:-1]):
        return slice(int(starts[0]), int(starts[-1] + lens[-1]))
    shift = np.repeat(starts - np.concatenate(([0], lens.cumsum()[:-1])), lens)
    return torch.from_numpy(np.arange(lens.sum()) + shift)


def head_queries(starts: np.ndarray, lens: np.ndarray, num_kv_heads: int) -> Tokens:
    """Indices `token * num_kv_heads + head`, by row, then head, then token."""
    if (lens == 1).all():
        return token_indices(starts * num_kv_heads, np.full_like(starts, num_kv_heads))
    parts = [
        (start + np.arange(n)) * num_kv_heads + head
        for start, n in zip(starts, lens, strict=True)
        for head in range(num_kv_heads)
    ]
    return torch.from_numpy(np.concatenate(parts))


def start_loc(lens: np.ndarray) -> torch.Tensor:
    """Prefix sums of lengths from 0 on, int32, as kernels take them."""
    return torch.from_numpy(np.concatenate(([0], lens.cumsum())).astype(np.int32))


def headwise_batch(
    rows: Rows, chosen: np.ndarray, block_table: torch.Tensor, num_kv_heads: int
) -> HeadwiseBatch:
    """Collects the tokens past the prompt of the chosen rows.

    Args:
        rows: The batch.
        chosen: Row indices; each has a plan and tokens past its prompt.
        block_table: Block ids of the whole batch, `[num_reqs, max_num_blocks]`.
        num_kv_heads: KV heads on this rank.

    Returns:
        The sequences, still without page tables.
    """
    plans = np.array([rows.plans[row] for row in chosen])
    stock_lens = rows.stock_lens[chosen]
    lens = rows.query_lens[chosen] - stock_lens
    starts = rows.query_start[chosen] + stock_lens
    first_packed = torch.from_numpy(plans[:, 0])
    table = block_table[torch.from_numpy(chosen)]
    return HeadwiseBatch(
        queries=head_queries(starts, lens, num_kv_heads),
        query_start_loc=start_loc(np.repeat(lens, num_kv_heads)),
        block_table=table,
        seq_lens=torch.from_numpy(rows.seq_lens[chosen]),
        first_packed=first_packed,
        tail_start=torch.from_numpy(plans[:, 2]),
        first_packed_blocks=table.gather(1, first_packed[:, None]).squeeze(1).to(torch.int64),
        table=None,
    )
