"""Selection, one program a head; `vllm_kvselect/selecting/selection.py`."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_kvselect.kernels.triton.ordering import append, find_cut, sortable, take
from vllm_kvselect.scoring.numbers import on_device
from vllm_kvselect.selecting import selection

_LARGEST_BLOCK = 8192
"""Tokens that a program holds at once: 16 a thread."""

_SMALL_BLOCK = 1024
"""The same for rows that are no longer: two sizes are compiled, whatever lengths prompts have."""

NUM_WARPS = 16


def row_block(num_tokens: int) -> int:
    """Tokens in a tile of programs that each walk a whole row."""
    return min(_LARGEST_BLOCK, _SMALL_BLOCK) if num_tokens <= _SMALL_BLOCK else _LARGEST_BLOCK


def select(scores: torch.Tensor, budgets: torch.Tensor, num_retained: int) -> torch.Tensor:
    """Twin of `selection.select`."""
    if scores.dtype != torch.float32:
        return selection.select(scores, budgets, num_retained)
    scores, num_heads = rows(scores), scores.shape[0]
    indices = torch.empty(num_retained, dtype=torch.int64, device=scores.device)
    _best_indices_kernel[(num_heads,)](
        scores,
        scores.stride(0),
        scores.shape[1],
        budgets,
        budgets.cumsum(0),
        indices,
        BLOCK=row_block(scores.shape[1]),
        num_warps=NUM_WARPS,
    )
    return indices


def best_first(scores: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Twin of `selection.best_first`."""
    if scores.dtype != torch.float32:
        return selection.best_first(scores, counts)
    scores = rows(scores)
    num_segments, num_heads, num_tokens = scores.shape
    raised = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    _best_first_kernel[(num_heads, num_segments)](
        scores,
        *scores.stride()[:2],
        num_tokens,
        on_device(counts, scores.device),
        raised,
        BLOCK=row_block(num_tokens),
        num_warps=NUM_WARPS,
    )
    return raised


def best_mask(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Twin of `selection.best_mask`."""
    if scores.dtype != torch.float32:
        return selection.best_mask(scores, counts)
    scores = rows(scores)
    mask = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    _best_mask_kernel[(scores.shape[0],)](
        scores,
        scores.stride(0),
        scores.shape[1],
        counts,
        mask,
        BLOCK=row_block(scores.shape[1]),
        num_warps=NUM_WARPS,
    )
    return mask


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """The kernels read rows of neighbouring elements, at any stride between rows."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@triton.jit(
    do_not_specialize=["stride", "num_tokens"], do_not_specialize_on_alignment=["scores_ptr"]
)
def _best_mask_kernel(scores_ptr, stride, num_tokens, counts_ptr, mask_ptr, BLOCK: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    scores_ptr += head * stride
    count = tl.load(counts_ptr + head).to(tl.int32)
    cut, num_ties = find_cut(scores_ptr, num_tokens, count, BLOCK)
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < num_tokens
        keys = sortable(tl.load(scores_ptr + tokens, mask=inside, other=0.0))
        taken, num_ties = take(keys, inside, cut, num_ties)
        tl.store(mask_ptr + head * num_tokens + tokens, taken, mask=inside)


@triton.jit(
    do_not_specialize=["segment_stride", "head_stride", "num_tokens"],
    do_not_specialize_on_alignment=["scores_ptr"],
)
def _best_first_kernel(
    scores_ptr, segment_stride, head_stride, num_tokens, counts_ptr, raised_ptr, BLOCK: tl.constexpr
):
    head, segment = tl.program_id(0), tl.program_id(1).to(tl.int64)
    scores_ptr += segment * segment_stride + head.to(tl.int64) * head_stride
    raised_ptr += (segment * tl.num_programs(0) + head) * num_tokens
    cut, num_ties = find_cut(
        scores_ptr, num_tokens, tl.load(counts_ptr + segment).to(tl.int32), BLOCK
    )
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < num_tokens
        scores = tl.load(scores_ptr + tokens, mask=inside, other=0.0)
        taken, num_ties = take(sortable(scores), inside, cut, num_ties)
        # What is not there stays so.
        raised = tl.where(taken & (scores > float("-inf")), float("inf"), scores)
        tl.store(raised_ptr + tokens, raised, mask=inside)


@triton.jit(
    do_not_specialize=["stride", "num_tokens"], do_not_specialize_on_alignment=["scores_ptr"]
)
def _best_indices_kernel(
    scores_ptr, stride, num_tokens, counts_ptr, ends_ptr, indices_ptr, BLOCK: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    scores_ptr += head * stride
    count = tl.load(counts_ptr + head).to(tl.int32)
    indices_ptr += tl.load(ends_ptr + head) - count
    num_written = 0
    cut, num_ties = find_cut(scores_ptr, num_tokens, count, BLOCK)
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < num_tokens
        keys = sortable(tl.load(scores_ptr + tokens, mask=inside, other=0.0))
        taken, num_ties = take(keys, inside, cut, num_ties)
        num_written = append(indices_ptr, num_written, head * num_tokens + tokens, taken)
