"""The rows of a batch as plain integers, and which of its tokens belong to which part."""

from typing import NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvselect.engine.drop.request import Request
from vllm_kvselect.planning.cuts import Cut

Indices = slice | np.ndarray
"""Indices on the host: a slice where they are consecutive, so that nothing is copied."""

Tokens = slice | torch.Tensor
"""The same where the tokens are."""


class Rows(NamedTuple):
    """The rows of a batch, as numpy arrays `[num_reqs]`.

    Attributes:
        query_start: Where each row's tokens start in the batch.
        query_lens: Tokens of the row in this step.
        seq_lens: Tokens of the request after this step.
        cut_positions: Tokens before each row's border; the sequence length for rows without one, so
            that all their tokens come before it.
        requests: Request of each row.
        borders: Its cut from which on tokens read what is retained; None if all are before one.
    """

    query_start: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray
    cut_positions: np.ndarray
    requests: list[Request]
    borders: list[Cut | None]

    @property
    def num_computed(self) -> np.ndarray:
        """Tokens computed before this step."""
        return self.seq_lens - self.query_lens

    @property
    def stock_lens(self) -> np.ndarray:
        """Tokens of each row that vLLM's own kernel computes: those before the border."""
        return (np.minimum(self.seq_lens, self.cut_positions) - self.num_computed).clip(0)

    def stock_tokens(self, row: int) -> slice:
        """Which tokens of the batch these are, of one row."""
        start = int(self.query_start[row])
        return slice(start, start + int(self.stock_lens[row]))

    @property
    def completing(self) -> np.ndarray:
        """Rows whose chunk reaches a cut that is made in this step, bool."""
        has_cut = np.array([border is not None for border in self.borders], dtype=bool)
        return has_cut & (self.stock_lens > 0) & (self.seq_lens >= self.cut_positions)


def token_indices(starts: np.ndarray, lens: np.ndarray) -> Indices:
    """Concatenates the ranges `start .. start + len`; a slice if they join without a gap."""
    if len(starts) and np.array_equal(starts[1:], (starts + lens)[:-1]):
        return slice(int(starts[0]), int(starts[-1] + lens[-1]))
    shift = np.repeat(starts - np.concatenate(([0], lens.cumsum()[:-1])), lens)
    return np.arange(lens.sum()) + shift


def head_queries(
    starts: np.ndarray, lens: np.ndarray, num_kv_heads: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the ranges `start .. start + len` and KV heads: by range, then head, then token."""
    ranges = [start + np.arange(n) for start, n in zip(starts, lens, strict=True)]
    tokens = np.concatenate([np.tile(part, num_kv_heads) for part in ranges])
    heads = np.concatenate([np.repeat(np.arange(num_kv_heads), n) for n in lens])
    return tokens, heads


def start_loc(lens: np.ndarray) -> np.ndarray:
    """Prefix sums of lengths from 0 on, int32, as kernels take them."""
    return np.concatenate(([0], lens.cumsum())).astype(np.int32)


def on_device(indices: Indices, device: torch.device) -> Tokens:
    """Takes indices to where the tokens are, without waiting for it."""
    return indices if isinstance(indices, slice) else async_tensor_h2d(indices, device)
