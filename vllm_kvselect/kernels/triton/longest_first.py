"""Orders of the sequences of all layers in one launch; `vllm_kvselect/paging/order.py`.

A sequence's place is the number of those that come before it: programs need not wait for others.
"""

import torch
import triton
import triton.language as tl

from vllm_kvselect.kernels.triton.selection import rows
from vllm_kvselect.paging.order import Orders, Sharing, padded

_BLOCK = 64
"""Sequences that a program finds the places of, and compares with at once."""


def longest_first(
    seq_lens: torch.Tensor,
    tail_start: torch.Tensor,
    offsets: torch.Tensor,
    block_size: int,
    out: Orders,
) -> None:
    """Twin of `order.longest_first`."""
    offsets = rows(offsets)
    num_layers, num_reqs, num_offsets = offsets.shape
    num_sequences = num_reqs * (num_offsets - 1)
    numbers, sharing = None, Sharing(1, 1, 1, 0)
    if out.schedules is not None:
        numbers, sharing = out.schedules
    _longest_first_kernel[(triton.cdiv(num_sequences, _BLOCK), num_layers)](
        seq_lens,
        tail_start,
        offsets,
        *offsets.stride()[:2],
        num_sequences,
        num_offsets - 1,
        block_size,
        out.sequences,
        out.sequences.stride(0),
        out.seq_lens,
        out.seq_lens.stride(0),
        numbers,
        0 if numbers is None else numbers.stride(0),
        padded(num_sequences),
        TILE=sharing.tile,
        PROCESSORS=sharing.num_processors,
        MOST_PARTS=sharing.most_parts,
        VECTORS=sharing.num_vectors,
        BLOCK=_BLOCK,
    )


@triton.jit
def _length(seq_lens_ptr, tail_start_ptr, offsets_ptr, req_stride, heads, block_size, sequence, n):
    """Entries of sequences; -1 beyond the last one."""
    is_one = sequence < n
    req = sequence // heads
    offsets_ptr += req * req_stride + sequence - req * heads
    run = tl.load(offsets_ptr + 1, mask=is_one, other=0).to(tl.int32)
    run -= tl.load(offsets_ptr, mask=is_one, other=0).to(tl.int32)
    tail = tl.load(seq_lens_ptr + req, mask=is_one, other=0).to(tl.int32)
    tail -= tl.load(tail_start_ptr + req, mask=is_one, other=0).to(tl.int32) * block_size
    return tl.where(is_one, run * block_size + tail, -1)


@triton.jit(
    do_not_specialize=[
        "offsets_layer_stride",
        "offsets_req_stride",
        "num_sequences",
        "sequences_stride",
        "lengths_stride",
        "numbers_stride",
        "padded",
    ],
    do_not_specialize_on_alignment=["seq_lens_ptr", "tail_start_ptr", "offsets_ptr"],
)
def _longest_first_kernel(
    seq_lens_ptr,
    tail_start_ptr,
    offsets_ptr,
    offsets_layer_stride,
    offsets_req_stride,
    num_sequences,
    num_kv_heads,
    block_size,
    sequences_ptr,
    sequences_stride,
    lengths_ptr,
    lengths_stride,
    numbers_ptr,
    numbers_stride,
    padded,
    TILE: tl.constexpr,
    PROCESSORS: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    layer = tl.program_id(1).to(tl.int64)
    offsets_ptr += layer * offsets_layer_stride
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own_length = _length(
        seq_lens_ptr,
        tail_start_ptr,
        offsets_ptr,
        offsets_req_stride,
        num_kv_heads,
        block_size,
        own,
        num_sequences,
    )
    place, num_tiles = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_sequences, BLOCK):
        other = first + tl.arange(0, BLOCK)
        length = _length(
            seq_lens_ptr,
            tail_start_ptr,
            offsets_ptr,
            offsets_req_stride,
            num_kv_heads,
            block_size,
            other,
            num_sequences,
        )
        is_longer = length[None, :] > own_length[:, None]
        is_earlier = (length[None, :] == own_length[:, None]) & (other[None, :] < own[:, None])
        place += tl.sum((is_longer | is_earlier).to(tl.int32), axis=1)
        num_tiles += tl.cdiv(tl.maximum(length, 0), TILE)
    is_one = own < num_sequences
    tl.store(sequences_ptr + layer * sequences_stride + place, own, mask=is_one)
    tl.store(lengths_ptr + layer * lengths_stride + place, own_length, mask=is_one)
    if numbers_ptr is not None:
        numbers_ptr += layer * numbers_stride
        share = tl.maximum(tl.cdiv(tl.sum(num_tiles) * 11, 10 * PROCESSORS), 1)
        parts = tl.cdiv(tl.cdiv(own_length, TILE), share)
        parts = tl.minimum(tl.maximum(parts, 1), MOST_PARTS)
        for vector in tl.static_range(VECTORS):
            tl.store(numbers_ptr + vector * padded + place, parts if vector == 1 else 1, is_one)
        tl.store(numbers_ptr + VECTORS * padded, 0)
