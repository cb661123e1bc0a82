"""In which order a kernel takes the sequences of one-head caches: the longest first.

A kernel hands out work in the order of a batch. Where a long sequence comes last, all but one of
the processors wait for it.
"""

from typing import NamedTuple

import torch

MOST_SHARED = 992
"""Sequences of a schedule: where a call has more, FlashAttention 3 cuts none of them."""

MOST_VECTORS = 3
"""Numbers that a sequence has in a schedule."""


class Sharing(NamedTuple):
    """How FlashAttention 3 shares out the sequences of a call, each of one query and one head.

    A schedule has some vectors, in each a number for every sequence and as many more as make a
    multiple of four. The second one says into how many parts a sequence is cut; the others, how
    many tiles its queries take, are ones. At the end is how many parts have been handed out: 0.

    Attributes:
        tile: Entries that are read at once.
        num_processors: Multiprocessors of the device.
        most_parts: Of a sequence.
        num_vectors: At least two.
    """

    tile: int
    num_processors: int
    most_parts: int
    num_vectors: int

    def size(self, num_sequences: int) -> int:
        """Numbers of a schedule."""
        return self.num_vectors * padded(num_sequences) + 1


class Schedules(NamedTuple):
    """What FlashAttention 3 would find out in every layer by a kernel of its own.

    Attributes:
        numbers: The schedule of each layer, `[num_layers, sharing.size(n)]` int32.
        sharing: How they are made.
    """

    numbers: torch.Tensor
    sharing: Sharing


class Orders(NamedTuple):
    """The sequences of each layer, the longest first; one is a request's KV head.

    Attributes:
        sequences: The sequence at each place, `[num_layers, n + 1]` int32; what is at the end,
            where kernels that take them as first queries look for no more, is anything.
        seq_lens: Entries of the sequence at each place, `[num_layers, n]` int32.
        schedules: How these are shared out, or None where the kernel finds out.
    """

    sequences: torch.Tensor
    seq_lens: torch.Tensor
    schedules: Schedules | None = None


def padded(num_sequences: int) -> int:
    """Numbers of a vector of a schedule, which begins where 16 bytes do."""
    return num_sequences + -num_sequences % 4


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
    if out.schedules is not None:
        _share_out(out.seq_lens, *out.schedules)


def _share_out(seq_lens: torch.Tensor, numbers: torch.Tensor, sharing: Sharing) -> None:
    """Cuts sequences so that a processor gets about one part in ten more than its share."""
    num_tiles, n = -(-seq_lens // sharing.tile), seq_lens.shape[1]
    share = -(-num_tiles.sum(1, keepdim=True) * 11 // (10 * sharing.num_processors))
    parts = -(-num_tiles // share.clamp(min=1))
    vectors = numbers[:, :-1].view(len(numbers), sharing.num_vectors, padded(n))[..., :n]
    vectors.fill_(1)
    vectors[:, 1] = parts.clamp(1, sharing.most_parts)
    numbers[:, -1] = 0
