"""The rows of a batch as plain integers, and which of its tokens belong to which part."""

from typing import NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

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
        cuts: The last cut that is made of each row's request, or None.
    """

    query_start: np.ndarray
    query_lens: np.ndarray
    seq_lens: np.ndarray
    cuts: list[Cut | None]

    @property
    def num_computed(self) -> np.ndarray:
        """Tokens computed before this step."""
        return self.seq_lens - self.query_lens

    @property
    def is_past(self) -> np.ndarray:
        """Rows whose tokens read what is retained, bool; the others read the whole cache.

        A chunk ends at each cut, and cuts are made between two steps: so a row is one or the other.
        """
        return np.array([cut is not None for cut in self.cuts], dtype=bool)

    def tokens(self, row: int) -> slice:
        """The tokens of one row in the batch."""
        start = int(self.query_start[row])
        return slice(start, start + int(self.query_lens[row]))


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
