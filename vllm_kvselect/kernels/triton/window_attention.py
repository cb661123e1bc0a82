"""The window's attention, reduced over its queries; `vllm_kvselect/scoring/snapkv.py`.

Keys are read twice: for the normalisers of the rows, then for the weights. To keep the exponentials
of the first pass would move more: `group * window` of them for every key (128 for four query heads
and 32 queries, as many as a key has channels), written and read again. Where the prefill's
attention hands out its log-sum-exp, the first pass can go.
"""

import math

import torch
import triton
import triton.language as tl

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels.triton.pooling import pool
from vllm_kvselect.kernels.triton.products import multiply, num_stages, padded, tile_size
from vllm_kvselect.kernels.triton.selection import rows
from vllm_kvselect.scorers import Pooling, QueryGroup
from vllm_kvselect.scoring import defensivekv, snapkv
from vllm_kvselect.scoring.inputs import ScoringInputs

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_MOST_SPLITS = 32
"""Parts of the prompt whose normalisers are computed side by side and joined in the second pass."""

_LEAST_SPLIT = 512
"""Tokens of a part: 8,192 tokens of 8 heads make 128 programs, about one for each SM of an H100."""

_LOG2_E = tl.constexpr(math.log2(math.e))


def snapkv_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Twin of `scoring.snapkv.snapkv_scores`."""
    if inputs.query.dtype not in DTYPES:
        return snapkv.snapkv_scores(inputs, config)
    attention = _attention(inputs, config.of(QueryGroup).group_reduction)
    pooling = config.of(Pooling)
    return pool(attention, pooling.pooling, pooling.kernel_size)


def mean_attention(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Twin of `scoring.defensivekv.mean_attention`."""
    if inputs.query.dtype not in DTYPES:
        return defensivekv.mean_attention(inputs, config)
    return _attention(inputs, "mean")


def _attention(inputs: ScoringInputs, group_reduction: str) -> torch.Tensor:
    """The window's attention to what comes before it."""
    given = (inputs.query, inputs.key, inputs.scale, group_reduction)
    return window_attention(*given, inputs.sinks, inputs.num_absent)


def window_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    group_reduction: str,
    sinks: torch.Tensor | None = None,
    num_absent: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mean over the window of each query head's attention, reduced over the query group.

    Args:
        query: `[window, num_heads, head_size]`.
        key: `[num_kv_heads, num_prompt_tokens, head_size]`; of `query`'s dtype or in fp8, whose
            own scale is then part of `scale`.
        scale: Softmax scale.
        group_reduction: `mean` or `max`.
        sinks: Attention sinks, `[num_heads]`, or None.
        num_absent: First columns of each head in which there is no key, `[num_kv_heads]` int64, or
            None.

    Returns:
        `[num_kv_heads, num_prompt_tokens - window]`, float32.
    """
    query, key = rows(query), rows(key)
    window, num_heads, head_size = query.shape
    num_kv_heads, num_tokens, _ = key.shape
    group, num_scored = num_heads // num_kv_heads, num_tokens - window
    channels = padded(head_size)
    num_rows, num_splits = group * window, min(_MOST_SPLITS, triton.cdiv(num_tokens, _LEAST_SPLIT))
    block = tile_size(channels, query.dtype, 128)
    normalizers = torch.empty(
        num_kv_heads, num_splits, num_rows, dtype=torch.float32, device=key.device
    )
    scores = torch.empty(num_kv_heads, num_scored, dtype=torch.float32, device=key.device)
    shape = (num_tokens, window, group, head_size)
    inputs = (query, *query.stride()[:2], key, *key.stride()[:2], scale * _LOG2_E.value, *shape)
    row_block = min(block, padded(num_rows))
    _normalizers_kernel[(num_splits, num_kv_heads, triton.cdiv(num_rows, row_block))](
        *inputs,
        normalizers,
        triton.cdiv(triton.cdiv(num_tokens, block), num_splits) * block,
        sinks,
        num_absent,
        ROWS=row_block,
        TOKENS=block,
        CHANNELS=channels,
        num_warps=8,
        num_stages=num_stages(channels, query.dtype),
    )
    if num_scored:
        _weights_kernel[(triton.cdiv(num_scored, block), num_kv_heads)](
            *inputs,
            normalizers,
            num_splits,
            scores,
            num_absent,
            LARGEST=group_reduction == "max",
            SPLITS=_MOST_SPLITS,
            ROWS=min(64, padded(window), tile_size(channels, query.dtype, 64)),
            TOKENS=block,
            CHANNELS=channels,
            num_warps=8,
            num_stages=2,
        )
    return scores


@triton.jit(do_not_specialize=["num_tokens", "split_size"])
def _normalizers_kernel(
    query_ptr,
    query_token_stride,
    query_head_stride,
    key_ptr,
    key_head_stride,
    key_token_stride,
    scale,
    num_tokens,
    window,
    group,
    head_size,
    normalizers_ptr,
    split_size,
    sinks_ptr,
    absent_ptr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Base-2 logarithms of the sums of exponentials, of some rows over a part of the prompt.

    Row `j * window + i` is query `i` of the head's `j`-th query head.
    """
    split, head = tl.program_id(0), tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, CHANNELS)
    position, member = rows % window, rows // window
    is_row, is_channel = rows < group * window, channels < head_size
    query_rows = position * query_token_stride + (head * group + member) * query_head_stride
    query = tl.load(
        query_ptr + query_rows[:, None] + channels[None, :],
        mask=is_row[:, None] & is_channel[None, :],
        other=0.0,
    )
    key_ptr += head.to(tl.int64) * key_head_stride
    last_seen = num_tokens - window + position
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sinks_ptr is not None:
        # As if the first part had one more key.
        has_sink = is_row & (split == 0)
        sink = tl.load(sinks_ptr + head * group + member, mask=has_sink, other=float("-inf"))
        largest = sink.to(tl.float32) * _LOG2_E
        total = tl.where(has_sink, 1.0, total)
    end = tl.minimum((split + 1) * split_size, num_tokens)
    for start in range(split * split_size, end, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        keys = tl.load(
            key_ptr + tokens[None, :].to(tl.int64) * key_token_stride + channels[:, None],
            mask=(tokens < num_tokens)[None, :] & is_channel[:, None],
            other=0.0,
        )
        logits = multiply(query, keys.to(query.dtype)) * scale
        logits = tl.where(tokens[None, :] <= last_seen[:, None], logits, float("-inf"))
        if absent_ptr is not None:
            is_absent = tokens < tl.load(absent_ptr + head)
            logits = tl.where(is_absent[None, :], float("-inf"), logits)
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        # A row that sees nothing yet keeps a sum of 0; the largest term of others is 1.
        pivot = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp2(largest - pivot) + tl.sum(tl.exp2(logits - pivot[:, None]), 1)
        largest = new_largest
    places = (head * tl.num_programs(0) + split) * group * window + rows
    tl.store(normalizers_ptr + places, largest + tl.log2(tl.maximum(total, 1.0)), mask=is_row)


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def _weights_kernel(
    query_ptr,
    query_token_stride,
    query_head_stride,
    key_ptr,
    key_head_stride,
    key_token_stride,
    scale,
    num_tokens,
    window,
    group,
    head_size,
    normalizers_ptr,
    num_splits,
    scores_ptr,
    absent_ptr,
    LARGEST: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Scores of a tile of tokens before the window, which all of its queries see."""
    head, num_scored = tl.program_id(1), num_tokens - window
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channels, splits = tl.arange(0, CHANNELS), tl.arange(0, SPLITS)
    is_channel = channels < head_size
    key_rows = head.to(tl.int64) * key_head_stride + tokens.to(tl.int64) * key_token_stride
    keys = tl.load(
        key_ptr + key_rows[:, None] + channels[None, :],
        mask=(tokens < num_scored)[:, None] & is_channel[None, :],
        other=0.0,
    )
    keys = keys.to(query_ptr.dtype.element_ty)
    scores = tl.zeros((TOKENS,), tl.float32)
    for member in range(group):
        query_ptr_head = query_ptr + (head * group + member) * query_head_stride
        mean = tl.zeros((TOKENS,), tl.float32)
        for first in range(0, window, ROWS):
            rows = first + tl.arange(0, ROWS)
            is_row = rows < window
            query = tl.load(
                query_ptr_head + rows[None, :] * query_token_stride + channels[:, None],
                mask=is_row[None, :] & is_channel[:, None],
                other=0.0,
            )
            places = (head * num_splits + splits[:, None]) * group * window + member * window + rows
            parts = tl.load(
                normalizers_ptr + places,
                mask=(splits < num_splits)[:, None] & is_row[None, :],
                other=float("-inf"),
            )
            largest = tl.max(parts, 0)
            pivot = tl.where(is_row, largest, 0.0)
            total = tl.maximum(tl.sum(tl.exp2(parts - pivot[None, :]), 0), 1.0)
            # Rows that do not exist have weights of 0.
            normalizers = tl.where(is_row, pivot + tl.log2(total), float("inf"))
            logits = multiply(keys, query) * scale - normalizers[None, :]
            if absent_ptr is not None:
                is_absent = tokens < tl.load(absent_ptr + head)
                logits = tl.where(is_absent[:, None], float("-inf"), logits)
            mean += tl.sum(tl.exp2(logits), 1)
        if LARGEST:
            scores = tl.maximum(scores, mean / window)
        else:
            scores += mean / (window * group)
    tl.store(scores_ptr + head.to(tl.int64) * num_scored + tokens, scores, mask=tokens < num_scored)
