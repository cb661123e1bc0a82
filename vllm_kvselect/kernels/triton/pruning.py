"""Exact pruning with static shapes; `needed_value_norms` of `vllm_kvselect/selecting/pruning.py`.

Which tokens are projected, and how many, is known on the device only, and their lists stay there.
Products are launched for as many tokens as there are; programs behind the end of a list return at
once. All norms would multiply as much as the output projection does in prefill, which is 8 % of an
8B Llama's weights; those needed are a fraction of them.
"""

import math

import torch
import triton
import triton.language as tl

from vllm_kvselect.kernels.triton.ordering import append, find_cut, sortable, take
from vllm_kvselect.kernels.triton.products import multiply, padded, tile_size
from vllm_kvselect.kernels.triton.selection import (
    NUM_WARPS,
    row_block,
    rows,
    select,
    stage_1_mask,
)
from vllm_kvselect.kernels.triton.value_norms import partial_norms, sum_of_parts
from vllm_kvselect.kernels.triton.window_attention import DTYPES
from vllm_kvselect.scoring.value_norms import OutputProjection
from vllm_kvselect.selecting import pruning

_BLOCK = 256
"""Tokens in a program that joins the parts of norms."""


def select_pruned(
    scores: torch.Tensor,
    weights: torch.Tensor,
    value: torch.Tensor,
    projection: OutputProjection,
    budgets: torch.Tensor,
    num_retained: int,
    alpha: float,
    eps: float,
    num_absent: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `pruning.select_pruned`, made of the twins of its parts."""
    parts = pruning.Parts(stage_1_mask, needed_value_norms, select)
    given = (scores, weights, value, projection, budgets, num_retained, alpha, eps, num_absent)
    return pruning.select_by_parts(parts, *given)


def needed_value_norms(
    scores: torch.Tensor,
    value: torch.Tensor,
    projection: OutputProjection,
    stage_1: torch.Tensor,
    budgets: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Twin of `pruning.needed_value_norms`, on float32 scores.

    A quarter more entries than stage 2 retains are projected first, twice as many in the reference.
    """
    if value.dtype not in DTYPES or scores.dtype != torch.float32:
        return pruning.needed_value_norms(scores, value, projection, stage_1, budgets, eps)
    scores, value, stage_1 = rows(scores), rows(value), stage_1.contiguous()
    num_heads, num_tokens = scores.shape
    bounds = _weighted_bounds(scores, value, projection, stage_1, eps)
    norms, keys = torch.zeros_like(bounds), torch.empty_like(bounds)
    tokens = torch.empty(num_heads, num_tokens, dtype=torch.int32, device=scores.device)
    # Of each head: how many tokens are listed, and how many stage 2 retains.
    counts, num_open = torch.empty(2, num_heads, dtype=torch.int32, device=scores.device)
    row_options = {"BLOCK": row_block(num_tokens), "num_warps": NUM_WARPS}
    lists = (bounds, num_tokens, tokens, counts, num_open)

    def project() -> None:
        parts = partial_norms(value, projection.weight, tokens, counts)
        _join_kernel[(triton.cdiv(num_tokens, _BLOCK), num_heads)](
            parts,
            parts.shape[0],
            projection.weight.shape[2],
            scores,
            scores.stride(0),
            eps,
            *lists[:-1],
            norms,
            keys,
            BLOCK=_BLOCK,
        )

    _first_kernel[(num_heads,)](budgets, *lists, **row_options)
    project()
    _second_kernel[(num_heads,)](keys, *lists, **row_options)
    project()
    return norms


def _weighted_bounds(
    scores: torch.Tensor,
    value: torch.Tensor,
    projection: OutputProjection,
    stage_1: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Upper bounds of what stage 2 ranks by, -1 for entries of stage 1; contiguous float32."""
    num_heads, num_tokens, head_size = value.shape
    hidden_size, form = projection.weight.shape[3], projection.bound_form
    bounds = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=scores.device)
    channels = padded(head_size)
    block = tile_size(channels, form.dtype, 128)
    _bounds_kernel[(triton.cdiv(num_tokens, block), num_heads)](
        scores,
        scores.stride(0),
        eps,
        value,
        *value.stride()[:2],
        form,
        head_size,
        math.sqrt(hidden_size) * pruning.rounding_factor(value, hidden_size),
        stage_1,
        num_tokens,
        bounds,
        TOKENS=block,
        COLUMNS=min(block, 64, channels),
        CHANNELS=channels,
        num_stages=2,
    )
    return bounds


@triton.jit(
    do_not_specialize=["scores_stride", "num_tokens"], do_not_specialize_on_alignment=["scores_ptr"]
)
def _bounds_kernel(
    scores_ptr,
    scores_stride,
    eps,
    value_ptr,
    value_head_stride,
    value_token_stride,
    form_ptr,
    head_size,
    factor,
    stage_1_ptr,
    num_tokens,
    bounds_ptr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channels = tl.arange(0, CHANNELS)
    inside, is_channel = tokens < num_tokens, channels < head_size
    value_rows = head * value_head_stride + tokens.to(tl.int64) * value_token_stride
    values = tl.load(
        value_ptr + value_rows[:, None] + channels[None, :],
        mask=inside[:, None] & is_channel[None, :],
        other=0.0,
    )
    values = values.to(form_ptr.dtype.element_ty)
    form_ptr += head * head_size * head_size
    squares = tl.zeros((TOKENS,), tl.float32)
    for first in range(0, head_size, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        is_column = columns < head_size
        form = tl.load(
            form_ptr + channels[:, None] * head_size + columns[None, :],
            mask=is_channel[:, None] & is_column[None, :],
            other=0.0,
        )
        # The same values once more: registers cannot be cut into columns.
        factors = tl.load(
            value_ptr + value_rows[:, None] + columns[None, :],
            mask=inside[:, None] & is_column[None, :],
            other=0.0,
        )
        squares += tl.sum(multiply(values, form) * factors.to(tl.float32), 1)
    bounds = factor * tl.sqrt(tl.maximum(squares, 0.0))
    scores = tl.load(scores_ptr + head * scores_stride + tokens, mask=inside, other=0.0)
    places = head * num_tokens + tokens
    taken = tl.load(stage_1_ptr + places, mask=inside, other=0) != 0
    bounds = tl.where(taken, -1.0, bounds * (scores + eps))
    tl.store(bounds_ptr + places, bounds, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _first_kernel(
    budgets_ptr, bounds_ptr, num_tokens, tokens_ptr, counts_ptr, open_ptr, BLOCK: tl.constexpr
):
    """Lists the best bounds of a head, a quarter more than stage 2 retains."""
    head = tl.program_id(0).to(tl.int64)
    bounds_ptr += head * num_tokens
    num_taken = 0
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        bounds = tl.load(bounds_ptr + tokens, mask=tokens < num_tokens, other=0.0)
        num_taken += tl.sum((bounds < 0).to(tl.int32))
    num_open = tl.load(budgets_ptr + head).to(tl.int32) - num_taken
    count = tl.minimum(tl.cdiv(5 * num_open, 4), num_tokens - num_taken)
    cut, num_ties = find_cut(bounds_ptr, num_tokens, count, BLOCK)
    num_listed = 0
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < num_tokens
        keys = sortable(tl.load(bounds_ptr + tokens, mask=inside, other=0.0))
        taken, num_ties = take(keys, inside, cut, num_ties)
        num_listed = append(tokens_ptr + head * num_tokens, num_listed, tokens, taken)
    tl.store(counts_ptr + head, num_listed)
    tl.store(open_ptr + head, num_open)


@triton.jit(do_not_specialize=["num_tokens"])
def _second_kernel(
    keys_ptr, bounds_ptr, num_tokens, tokens_ptr, counts_ptr, open_ptr, BLOCK: tl.constexpr
):
    """Lists what else reaches the cut: the key of the last that stage 2 would retain so far."""
    head = tl.program_id(0).to(tl.int64)
    num_open, num_keys = tl.load(open_ptr + head), tl.load(counts_ptr + head)
    cut, _ = find_cut(keys_ptr + head * num_tokens, num_keys, num_open, BLOCK)
    num_listed = 0
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < num_tokens
        bounds = tl.load(bounds_ptr + head * num_tokens + tokens, mask=inside, other=0.0)
        reaching = inside & (sortable(bounds) >= cut)
        num_listed = append(tokens_ptr + head * num_tokens, num_listed, tokens, reaching)
    tl.store(counts_ptr + head, num_listed)


@triton.jit(
    do_not_specialize=["scores_stride", "num_tokens"], do_not_specialize_on_alignment=["scores_ptr"]
)
def _join_kernel(
    parts_ptr,
    num_parts,
    group,
    scores_ptr,
    scores_stride,
    eps,
    bounds_ptr,
    num_tokens,
    tokens_ptr,
    counts_ptr,
    norms_ptr,
    keys_ptr,
    BLOCK: tl.constexpr,
):
    """Joins the parts of the listed norms, and takes their tokens out of the running."""
    head = tl.program_id(1).to(tl.int64)
    count = tl.load(counts_ptr + head)
    if tl.program_id(0) * BLOCK >= count:
        return
    listed = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = listed < count
    places = head * num_tokens + listed
    stride = tl.num_programs(1).to(tl.int64) * num_tokens
    norms = sum_of_parts(parts_ptr, num_parts, stride, places, inside, group, BLOCK)
    tokens = tl.load(tokens_ptr + places, mask=inside, other=0)
    scores = tl.load(scores_ptr + head * scores_stride + tokens, mask=inside, other=0.0)
    tl.store(keys_ptr + places, (scores + eps) * norms, mask=inside)
    tl.store(norms_ptr + head * num_tokens + tokens, norms, mask=inside)
    tl.store(bounds_ptr + head * num_tokens + tokens, tl.full((BLOCK,), -1.0, tl.float32), inside)
