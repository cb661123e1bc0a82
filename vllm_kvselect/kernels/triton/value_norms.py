"""Projected value norms in one kernel; those of `vllm_kvselect/scoring/value_norms.py`.

A tile of `V W_O` lives in registers until its magnitudes are summed up. W_O streams from the L2
cache once for every tile of tokens, so those are as large as registers allow.
"""

import torch
import triton
import triton.language as tl

from vllm_kvselect.kernels.triton.products import multiply, num_stages, padded, tile_size
from vllm_kvselect.kernels.triton.selection import rows
from vllm_kvselect.kernels.triton.window_attention import DTYPES
from vllm_kvselect.scoring import value_norms as references

_PART = 2048
"""Columns of `V W_O` that one program sums up: few tokens of few heads still fill the SMs."""

_BLOCK = 256
"""Tokens in a program that joins the parts."""


def projected_value_norms(
    value: torch.Tensor, projection: references.OutputProjection
) -> torch.Tensor:
    """Twin of `value_norms.projected_value_norms`; products and sums are float32 throughout."""
    if value.dtype not in DTYPES:
        return references.projected_value_norms(value, projection)
    weight = projection.weight
    norms = torch.empty(value.shape[:2], dtype=torch.float32, device=value.device)
    group = weight.shape[2]
    parts = partial_norms(rows(value), weight.contiguous(), None, None)
    num_parts, num_heads, num_tokens = parts.shape
    _join_kernel[(triton.cdiv(num_tokens, _BLOCK), num_heads)](
        parts, num_parts, group, num_tokens, norms, BLOCK=_BLOCK
    )
    return norms


def partial_norms(
    value: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> torch.Tensor:
    """Norms over parts of the columns, so that their sum is the same in whatever tile a token is.

    Args:
        value: `[num_kv_heads, num_tokens, head_size]`, rows of neighbouring elements.
        weight: W_O as in `OutputProjection`, contiguous.
        tokens: Which tokens of each head, `[num_kv_heads, num_tokens]` int32, or None for all.
        counts: How many of `tokens` are to be projected, `[num_kv_heads]` int32.

    Returns:
        Sums of magnitudes over the query group, `[num_parts, num_kv_heads, num_tokens]` float32;
        column `i` is that of the i-th of `tokens`.
    """
    num_heads, num_tokens, head_size = value.shape
    channels, width = padded(head_size), weight.shape[2] * weight.shape[3]
    num_parts = triton.cdiv(width, _PART)
    parts = torch.empty(num_parts, num_heads, num_tokens, dtype=torch.float32, device=value.device)
    block = tile_size(channels, value.dtype, 128)
    # Twice as many bytes of values, which are read once.
    token_block = 2 * block
    _parts_kernel[(triton.cdiv(num_tokens, token_block), num_heads, num_parts)](
        value,
        *value.stride()[:2],
        weight,
        width,
        head_size,
        tokens,
        counts,
        parts,
        num_tokens,
        LISTED=tokens is not None,
        PART=_PART,
        TOKENS=token_block,
        COLUMNS=block,
        CHANNELS=channels,
        num_warps=8,
        num_stages=num_stages(channels, value.dtype),
    )
    return parts


@triton.jit(do_not_specialize=["num_tokens"])
def _parts_kernel(
    value_ptr,
    value_head_stride,
    value_token_stride,
    weight_ptr,
    width,
    head_size,
    tokens_ptr,
    counts_ptr,
    parts_ptr,
    num_tokens,
    LISTED: tl.constexpr,
    PART: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    head, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    count = num_tokens
    if LISTED:
        count = tl.load(counts_ptr + head)
    if tl.program_id(0) * TOKENS >= count:
        return
    places = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = places < count
    tokens = places
    if LISTED:
        tokens = tl.load(tokens_ptr + head * num_tokens + places, mask=inside, other=0)
    channels = tl.arange(0, CHANNELS)
    is_channel = channels < head_size
    value_rows = head * value_head_stride + tokens.to(tl.int64) * value_token_stride
    values = tl.load(
        value_ptr + value_rows[:, None] + channels[None, :],
        mask=inside[:, None] & is_channel[None, :],
        other=0.0,
    )
    weight_ptr += head * head_size * width + channels[:, None] * width
    norms = tl.zeros((TOKENS,), tl.float32)
    end = tl.minimum((part + 1) * PART, width)
    for start in range(part * PART, end, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        weights = tl.load(
            weight_ptr + columns[None, :],
            mask=is_channel[:, None] & (columns < end)[None, :],
            other=0.0,
        )
        norms += tl.sum(tl.abs(multiply(values, weights)), 1)
    parts_ptr += (part * tl.num_programs(1) + head) * num_tokens
    tl.store(parts_ptr + places, norms, mask=inside)


@triton.jit
def sum_of_parts(parts_ptr, num_parts, stride, places, inside, group, BLOCK: tl.constexpr):
    """Joins the parts of some norms, always in the same order."""
    norms = tl.zeros((BLOCK,), tl.float32)
    for part in range(num_parts):
        norms += tl.load(parts_ptr + part * stride + places, mask=inside, other=0.0)
    return norms / group


@triton.jit(do_not_specialize=["num_tokens"])
def _join_kernel(parts_ptr, num_parts, group, num_tokens, norms_ptr, BLOCK: tl.constexpr):
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < num_tokens
    places = head * num_tokens + tokens
    stride = tl.num_programs(1).to(tl.int64) * num_tokens
    norms = sum_of_parts(parts_ptr, num_parts, stride, places, inside, group, BLOCK)
    tl.store(norms_ptr + places, norms, mask=inside)
