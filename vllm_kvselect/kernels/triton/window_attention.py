"""The window's attention, reduced over its queries, of all rows; `vllm_kvselect/scoring/snapkv.py`.

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
from vllm_kvselect.kernels.triton.paged import CODES, UNSPECIALISED, empty, paged, places_of, read
from vllm_kvselect.kernels.triton.pooling import pool
from vllm_kvselect.kernels.triton.products import multiply, num_stages, padded, tile_size
from vllm_kvselect.scorers import Pooling, QueryGroup
from vllm_kvselect.scoring.held import Held

_MOST_SPLITS = 32
"""Parts of the columns whose normalisers are computed side by side, joined in the second pass."""

_LEAST_SPLIT = 512
"""Columns of a part: 8,192 of 8 heads make 128 programs, about one for each SM of an H100."""

_LOG2_E = tl.constexpr(math.log2(math.e))

MEAN, LARGEST, WORST = range(3)
"""How a column's weights become one: their mean; the largest mean of a query head; the largest."""


def snapkv_scores(held: Held, config: EvictionConfig) -> torch.Tensor:
    """Twin of `scoring.snapkv.snapkv_scores`, over rows."""
    pooling, kind = config.of(Pooling), config.of(QueryGroup).group_reduction
    size = pooling.kernel_size
    attention = window_attention(held, LARGEST if kind == "max" else MEAN, size // 2)
    return pool(held, config.window, attention, pooling.pooling, size)


def mean_attention(held: Held, config: EvictionConfig) -> torch.Tensor:
    """Twin of `scoring.defensivekv.mean_attention`, over rows."""
    return window_attention(held, MEAN, 0)


def defensive_scores(held: Held, config: EvictionConfig) -> torch.Tensor:
    """Twin of `scoring.defensivekv.defensive_scores`, over rows, for maxima in the pooling."""
    size = config.of(Pooling).kernel_size
    num_more = max(held.behind)  # the mean is over all that is scored
    attention = window_attention(held, WORST, num_more)
    worst = pool(held, config.window, attention, "max", size, num_more)
    absent = held.num_absent.view(-1, held.num_layers, held.num_kv_heads)
    num_scored = held.on_device[0, :, None, None] + (held.num_competing - config.window) - absent
    mean = worst.sum(dim=-1) / num_scored.view(held.num_absent.shape)
    return torch.maximum(worst[..., : held.num_competing], mean[..., None])


def window_attention(held: Held, reduction: int, num_more: int) -> torch.Tensor:
    """The window's attention to each column, reduced over its queries and the query group.

    `num_more` columns are wanted beyond those that compete; those of a request's window are 0.

    Returns:
        `[num_rows, num_kv_heads, num_competing + n]` float32, n at most `num_more`.
    """
    query = held.query
    assert query is not None
    query = query if query[0, 0, 0].is_contiguous() else query.contiguous()
    window, num_heads, head_size = query.shape[2:]
    num_rows = held.num_rows
    constants, dtype = held.paged, query.dtype
    group, most_behind = num_heads // held.num_kv_heads, max(held.behind)
    num_columns = held.num_competing + most_behind
    channels = padded(head_size)
    num_queries, num_splits = (
        group * window,
        min(_MOST_SPLITS, triton.cdiv(num_columns, _LEAST_SPLIT)),
    )
    block = tile_size(channels, dtype, 128)
    num_owners = num_rows * held.num_kv_heads
    normalizers = torch.empty(
        num_owners, num_splits, num_queries, dtype=torch.float32, device=query.device
    )
    scores = empty(held, held.num_competing + min(num_more, most_behind))
    given = {
        **paged(held),
        "behind_ptr": held.on_device,
        "query_ptr": query,
        "request_stride": query.stride(0),
        "layer_stride": query.stride(1),
        "query_stride": query.stride(2),
        "scales_ptr": constants.scales,
        "window": window,
        "group": group,
        "normalizers_ptr": normalizers,
        "num_splits": num_splits,
        "TOKENS": block,
        "CHANNELS": channels,
        "num_warps": 8,
    }
    row_block = min(block, padded(num_queries))
    grid = (num_owners * num_splits, triton.cdiv(num_queries, row_block))
    _normalizers_kernel[grid](
        **given,
        split_size=triton.cdiv(triton.cdiv(num_columns, block), num_splits) * block,
        sinks_ptr=constants.sinks,
        ROWS=row_block,
        num_stages=num_stages(channels, dtype),
    )
    if num_wanted := scores.shape[2]:
        _weights_kernel[(num_owners * triton.cdiv(num_wanted, block),)](
            **given,
            scores_ptr=scores,
            num_columns=num_wanted,
            REDUCTION=reduction,
            SPLITS=_MOST_SPLITS,
            ROWS=min(64, padded(window), tile_size(channels, dtype, 64)),
            num_stages=2,
        )
    return scores


_STRIDES = ["request_stride", "layer_stride", "query_stride"]


@triton.jit(do_not_specialize=[*UNSPECIALISED, *_STRIDES, "num_splits", "split_size"])
def _normalizers_kernel(
    memory_ptr,
    codes_ptr,
    pages_ptr,
    pages_width,
    absent_ptr,
    num_competing,
    num_layers,
    num_heads,
    behind_ptr,
    query_ptr,
    request_stride,
    layer_stride,
    query_stride,
    scales_ptr,
    window,
    group,
    normalizers_ptr,
    num_splits,
    split_size,
    sinks_ptr,
    PAGE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Base-2 logarithms of the sums of exponentials, of some queries over a part of the columns.

    Query row `j * window + i` is query `i` of the head's `j`-th query head.
    """
    owner, split = (tl.program_id(0) // num_splits).to(tl.int64), tl.program_id(0) % num_splits
    row, head = owner // num_heads, owner % num_heads
    layer = row % num_layers
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, CHANNELS)
    position, member = rows % window, rows // window
    is_row, is_channel = rows < group * window, channels < HEAD_SIZE
    query_ptr += row // num_layers * request_stride + layer * layer_stride
    query_rows = position * query_stride + (head * group + member) * HEAD_SIZE
    query = tl.load(
        query_ptr + query_rows[:, None] + channels[None, :],
        mask=is_row[:, None] & is_channel[None, :],
        other=0.0,
    )
    if codes_ptr is not None:
        codes_ptr += row % num_layers * CODES
    scale = tl.load(scales_ptr + layer) * _LOG2_E
    num_columns = num_competing + tl.load(behind_ptr + row // num_layers)
    num_absent = tl.load(absent_ptr + owner).to(tl.int32)
    last_seen = num_columns - window + position
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sinks_ptr is not None:
        # As if the first part had one more key.
        has_sink = is_row & (split == 0)
        sinks_ptr += (layer * num_heads + head) * group
        sink = tl.load(sinks_ptr + member, mask=has_sink, other=float("-inf"))
        largest = sink.to(tl.float32) * _LOG2_E
        total = tl.where(has_sink, 1.0, total)
    end = tl.minimum((split + 1) * split_size, num_columns)
    for start in range(split * split_size, end, TOKENS):
        columns = start + tl.arange(0, TOKENS)
        inside = (columns < num_columns) & (columns >= num_absent)
        places = places_of(pages_ptr, pages_width, owner, columns, inside, PAGE) * (2 * HEAD_SIZE)
        mask = inside[None, :] & is_channel[:, None]
        keys = read(memory_ptr, places[None, :] + channels[:, None], mask, codes_ptr)
        logits = multiply(query, keys) * scale
        is_seen = (columns[None, :] <= last_seen[:, None]) & inside[None, :]
        logits = tl.where(is_seen, logits, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(logits, 1))
        # A row that sees nothing yet keeps a sum of 0; the largest term of others is 1.
        pivot = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp2(largest - pivot) + tl.sum(tl.exp2(logits - pivot[:, None]), 1)
        largest = new_largest
    places = (owner * num_splits + split) * group * window + rows
    tl.store(normalizers_ptr + places, largest + tl.log2(tl.maximum(total, 1.0)), mask=is_row)


@triton.jit(do_not_specialize=[*UNSPECIALISED, *_STRIDES, "num_splits"])
def _weights_kernel(
    memory_ptr,
    codes_ptr,
    pages_ptr,
    pages_width,
    absent_ptr,
    num_competing,
    num_layers,
    num_heads,
    behind_ptr,
    query_ptr,
    request_stride,
    layer_stride,
    query_stride,
    scales_ptr,
    window,
    group,
    normalizers_ptr,
    num_splits,
    scores_ptr,
    num_columns,
    PAGE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    REDUCTION: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Scores of a tile of columns before the window, which all of its queries see."""
    num_tiles = tl.cdiv(num_columns, TOKENS)
    owner, tile = (tl.program_id(0) // num_tiles).to(tl.int64), tl.program_id(0) % num_tiles
    row, head = owner // num_heads, owner % num_heads
    columns = tile * TOKENS + tl.arange(0, TOKENS)
    channels, splits = tl.arange(0, CHANNELS), tl.arange(0, SPLITS)
    is_channel = channels < HEAD_SIZE
    num_scored = num_competing + tl.load(behind_ptr + row // num_layers) - window
    inside = (columns < num_scored) & (columns >= tl.load(absent_ptr + owner).to(tl.int32))
    places = places_of(pages_ptr, pages_width, owner, columns, inside, PAGE) * (2 * HEAD_SIZE)
    mask = inside[:, None] & is_channel[None, :]
    if codes_ptr is not None:
        codes_ptr += row % num_layers * CODES
    keys = read(memory_ptr, places[:, None] + channels[None, :], mask, codes_ptr)
    scale = tl.load(scales_ptr + row % num_layers) * _LOG2_E
    scores = tl.zeros((TOKENS,), tl.float32)
    normalizers_ptr += owner * num_splits * group * window
    query_ptr += row // num_layers * request_stride + row % num_layers * layer_stride
    query_ptr += head * group * HEAD_SIZE
    for member in range(group):
        mean = tl.zeros((TOKENS,), tl.float32)
        for first in range(0, window, ROWS):
            rows = first + tl.arange(0, ROWS)
            is_row = rows < window
            query_rows = rows * query_stride + member * HEAD_SIZE
            query = tl.load(
                query_ptr + query_rows[None, :] + channels[:, None],
                mask=is_row[None, :] & is_channel[:, None],
                other=0.0,
            )
            of_rows = splits[:, None] * group * window + member * window + rows
            parts = tl.load(
                normalizers_ptr + of_rows,
                mask=(splits < num_splits)[:, None] & is_row[None, :],
                other=float("-inf"),
            )
            largest = tl.max(parts, 0)
            pivot = tl.where(is_row, largest, 0.0)
            total = tl.maximum(tl.sum(tl.exp2(parts - pivot[None, :]), 0), 1.0)
            # Rows that do not exist have weights of 0.
            normalizers = tl.where(is_row, pivot + tl.log2(total), float("inf"))
            weights = tl.exp2(multiply(keys, query) * scale - normalizers[None, :])
            if REDUCTION == 2:
                scores = tl.maximum(scores, tl.max(weights, 1))
            else:
                mean += tl.sum(weights, 1)
        if REDUCTION == 1:
            scores = tl.maximum(scores, mean / window)
        if REDUCTION == 0:
            scores += mean / (window * group)
    scores = tl.where(inside, scores, 0.0)
    tl.store(scores_ptr + owner * num_columns + columns, scores, mask=columns < num_columns)
