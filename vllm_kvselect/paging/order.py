"""In which order a kernel takes the sequences of one-head caches: the longest first.

A kernel hands out work in the order of a batch. Where a long sequence comes last, all but one of
the processors wait for it.
"""

from typing import NamedTuple

import torch


class Orders(NamedTuple):
    """The sequences of each layer, the longest first; one is a request's KV head.

    Attributes:
        sequences: The sequence at each place, `[num_layers, n + 1]` int32; what is at the end,
            where kernels that take them as first queries look for no more, is anything.
        seq_lens: Entries of the sequence at each place, `[num_layers, n]` int32.
    """

    sequences: torch.Tensor
    seq_lens: torch.Tensor


def longest_first(
    seq_lens: torch.Tensor,
    tail_start: torch.Tensor,
    offsets: torch.Tensor,
    block_size: int,
    out: Orders,
) -> None:
    """Sorts the sequences of several layers by their lengths; equal ones stay in order.

    Args:
        seq_lens: Tokens of each request, the dropped ones included, `[num_reqs]`.
        tail_start: Index of the first tail block, `[num_reqs]`.
        offsets: Where each head's pages start, and where the last one's end,
            `[num_layers, num_reqs, num_kv_heads + 1]`.
        block_size: Entries per page.
        out: Filled in, for `n = num_reqs * num_kv_heads`.
    """
    tails = (seq_lens - tail_start * block_size)[:, None]
    lengths = (offsets.diff(dim=-1) * block_size + tails).flatten(1)
    order = lengths.argsort(dim=1, descending=True, stable=True)
    out.sequences[:, :-1].copy_(order)
    out.seq_lens.copy_(lengths.gather(1, order))
