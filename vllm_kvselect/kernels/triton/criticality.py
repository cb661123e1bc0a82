"""Segments of queries and blocks of keys: twins of `vllm_kvselect/prefilling/criticality.py`.

One program reads the tokens of a group once, and one a tile of blocks, which it multiplies with all
segments: nothing as large as the prompt's square is ever made.
"""

import torch
import triton
import triton.language as tl

from vllm_kvselect.kernels.triton.paged import DTYPES
from vllm_kvselect.kernels.triton.selection import rows
from vllm_kvselect.prefilling import criticality as reference
from vllm_kvselect.prefilling.criticality import Extremes, middle_of

_TOKENS = 32
"""Of a group at once: a block of keys, a part of a segment of queries."""
_BLOCKS = 64
"""In a program: 96 programs for 2,048 blocks of 3 heads."""


def extremes(vectors: torch.Tensor, size: int) -> Extremes:
    """Twin of `criticality.extremes`."""
    if vectors.dtype not in DTYPES:
        return reference.extremes(vectors, size)
    vectors = rows(vectors)
    num_heads, num_tokens, head_size = vectors.shape
    num_groups = num_tokens // size
    assert num_groups * size == num_tokens
    largest, smallest = vectors.new_empty(2, num_heads, num_groups, head_size)
    if num_groups:
        _extremes_kernel[(num_groups, num_heads)](
            vectors,
            *vectors.stride()[:2],
            largest,
            smallest,
            num_groups,
            size,
            HEAD_SIZE=head_size,
            CHANNELS=triton.next_power_of_2(head_size),
            TOKENS=min(_TOKENS, triton.next_power_of_2(size)),
        )
    return Extremes(largest, smallest)


def criticality(
    queries: Extremes, keys: Extremes, scale: float, num_before: torch.Tensor
) -> torch.Tensor:
    """Twin of `criticality.criticality`; products and sums are float32 throughout."""
    if keys.largest.dtype not in DTYPES:
        return reference.criticality(queries, keys, scale, num_before)
    largest, smallest = rows(keys.largest), rows(keys.smallest)
    assert largest.stride() == smallest.stride()
    num_kv_heads, num_blocks, head_size = largest.shape
    middle = middle_of(queries, num_kv_heads).contiguous()
    _, group, num_segments, _ = middle.shape
    logits = middle.new_empty(num_segments, num_kv_heads, num_blocks)
    _logits_kernel[(triton.cdiv(num_blocks, _BLOCKS), num_kv_heads)](
        middle,
        largest,
        smallest,
        *largest.stride()[:2],
        num_before,
        logits,
        num_kv_heads,
        num_blocks,
        num_segments,
        scale,
        GROUP=group,
        HEAD_SIZE=head_size,
        CHANNELS=triton.next_power_of_2(head_size),
        BLOCKS=_BLOCKS,
    )
    return logits.softmax(dim=-1)


@triton.jit(do_not_specialize=["num_groups"])
def _extremes_kernel(
    vectors_ptr,
    head_stride,
    token_stride,
    largest_ptr,
    smallest_ptr,
    num_groups,
    size,
    HEAD_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    group, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    channels = tl.arange(0, CHANNELS)
    is_channel = channels < HEAD_SIZE
    vectors_ptr += head * head_stride + group * size * token_stride
    largest = tl.full((CHANNELS,), float("-inf"), tl.float32)
    smallest = tl.full((CHANNELS,), float("inf"), tl.float32)
    for start in range(0, size, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        places = tokens[:, None].to(tl.int64) * token_stride + channels[None, :]
        inside = (tokens < size)[:, None] & is_channel[None, :]
        high = tl.load(vectors_ptr + places, mask=inside, other=float("-inf")).to(tl.float32)
        low = tl.load(vectors_ptr + places, mask=inside, other=float("inf")).to(tl.float32)
        largest = tl.maximum(largest, tl.max(high, 0))
        smallest = tl.minimum(smallest, tl.min(low, 0))
    row = (head * num_groups + group) * HEAD_SIZE + channels
    element = largest_ptr.dtype.element_ty
    tl.store(largest_ptr + row, largest.to(element), mask=is_channel)
    tl.store(smallest_ptr + row, smallest.to(element), mask=is_channel)


@triton.jit(do_not_specialize=["num_blocks", "num_segments"])
def _logits_kernel(
    middle_ptr,
    largest_ptr,
    smallest_ptr,
    head_stride,
    block_stride,
    num_before_ptr,
    logits_ptr,
    num_kv_heads,
    num_blocks,
    num_segments,
    scale,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    channels = tl.arange(0, CHANNELS)
    is_channel, inside = channels < HEAD_SIZE, blocks < num_blocks
    places = head * head_stride + blocks[:, None] * block_stride + channels[None, :]
    mask = inside[:, None] & is_channel[None, :]
    largest = tl.load(largest_ptr + places, mask=mask, other=0.0).to(tl.float32)
    smallest = tl.load(smallest_ptr + places, mask=mask, other=0.0).to(tl.float32)
    for segment in range(num_segments):
        total = tl.zeros((BLOCKS,), tl.float32)
        for member in tl.static_range(GROUP):
            row = ((head * GROUP + member) * num_segments + segment) * HEAD_SIZE
            query = tl.load(middle_ptr + row + channels, mask=is_channel, other=0.0)[None, :]
            total += tl.maximum(tl.sum(query * largest, 1), tl.sum(query * smallest, 1))
        is_before = blocks < tl.load(num_before_ptr + segment)
        logits = tl.where(is_before, total * (scale / GROUP), float("-inf"))
        row = (segment * num_kv_heads + head) * num_blocks
        tl.store(logits_ptr + row + blocks, logits, mask=inside)
