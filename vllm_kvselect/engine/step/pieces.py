"""Pieces of a batch's rows: which of its tokens are sparse, and which read all before them."""

from collections.abc import Mapping
from typing import NamedTuple, Self

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvselect.engine.step.rows import Rows, head_queries, on_device, start_loc, token_indices
from vllm_kvselect.engine.step.sparse import SparseBatch, SparseRow


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

        Args:
            rows: The batch.
            sparse: Sparse segments by row, which are left out; what is beside them may be two
                pieces.
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


def sparse_rows(rows: Rows, block_table: torch.Tensor, block_size: int) -> dict[int, SparseRow]:
    """The sparse segments of a batch.

    Args:
        rows: The batch.
        block_table: Block ids of its rows.
        block_size: Tokens per block.

    Returns:
        Those of each row that has any, by its index.
    """
    found = {}
    for row in np.flatnonzero(~rows.is_past):
        request, tokens = rows.requests[row], rows.tokens(row)
        begin = int(rows.num_computed[row])
        segments, prefill = request.plan.segments, request.progress.sparse
        if segments is None or prefill is None:
            continue
        starts = segments.sparse_part(begin, begin + tokens.stop - tokens.start)
        if not starts:
            continue
        end, shift = starts[-1] + segments.size, tokens.start - begin
        found[int(row)] = SparseRow(
            prefill=prefill,
            config=request.plan.settings,
            tokens=slice(starts.start + shift, end + shift),
            starts=starts,
            chunk=slice(tokens.start, end + shift),
            chunk_start=begin,
            block_ids=block_table[row, : end // block_size].to(torch.int64),
            block_size=block_size,
        )
    return found


def sparse_batch(rows: list[SparseRow], max_seq_len: int, num_kv_heads: int) -> SparseBatch:
    """Puts the sparse segments of some rows into one batch.

    Args:
        rows: The rows.
        max_seq_len: Upper bound on the tokens that a segment reads.
        num_kv_heads: KV heads on this rank.
    """
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
