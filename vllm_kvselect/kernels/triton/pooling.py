"""Pooling along the tokens; `max_pool` and `mean_pool` of `vllm_kvselect/scoring/snapkv.py`."""

import torch
import triton
import triton.language as tl

from vllm_kvselect.kernels.triton.paged import empty
from vllm_kvselect.scoring.held import Held

_BLOCK = 1024


def pool(
    held: Held, window: int, scores: torch.Tensor, pooling: str, kernel_size: int, num_more: int = 0
) -> torch.Tensor:
    """The maximum or the mean over `kernel_size` neighbouring columns before the window.

    Args:
        held: What requests hold.
        window: Columns of a request's end that have no scores.
        scores: `[num_rows, num_kv_heads, n]`, contiguous float32, as many as are read; 0 where
            there is no entry.
        pooling: `max`, or `mean`, for which zeros are beyond both ends.
        kernel_size: Odd.
        num_more: Columns that are wanted beyond those that compete.

    Returns:
        `[num_rows, num_kv_heads, num_competing + num_more]`, 0 where there is no entry, and in the
        window.
    """
    num_wanted = held.num_competing + num_more
    if kernel_size == 1 and scores.shape[2] == num_wanted:
        return scores
    pooled = empty(held, num_wanted)
    if not pooled.numel():
        return pooled
    num_owners = held.num_rows * held.num_kv_heads
    _pool_kernel[(num_owners * triton.cdiv(num_wanted, _BLOCK),)](
        scores,
        scores.shape[2],
        kernel_size,
        held.num_absent,
        held.on_device,
        held.num_competing - window,
        held.num_layers * held.num_kv_heads,
        pooled,
        num_wanted,
        LARGEST=pooling == "max",
        BLOCK=_BLOCK,
    )
    return pooled


@triton.jit(do_not_specialize=["num_columns", "num_before", "num_owners_of_request", "num_wanted"])
def _pool_kernel(
    scores_ptr,
    num_columns,
    kernel_size,
    absent_ptr,
    behind_ptr,
    num_before,
    num_owners_of_request,
    pooled_ptr,
    num_wanted,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    num_tiles = tl.cdiv(num_wanted, BLOCK)
    owner, tile = (tl.program_id(0) // num_tiles).to(tl.int64), tl.program_id(0) % num_tiles
    tokens = tile * BLOCK + tl.arange(0, BLOCK)
    num_scored = num_before + tl.load(behind_ptr + owner // num_owners_of_request)
    scores_ptr += owner * num_columns
    pooled = tl.full((BLOCK,), float("-inf") if LARGEST else 0.0, tl.float32)
    for offset in range(kernel_size):
        near = tokens + offset - kernel_size // 2
        inside = (near >= 0) & (near < num_scored) & (near < num_columns)
        if LARGEST:
            pooled = tl.maximum(
                pooled, tl.load(scores_ptr + near, mask=inside, other=float("-inf"))
            )
        else:
            pooled += tl.load(scores_ptr + near, mask=inside, other=0.0)
    if not LARGEST:
        pooled /= kernel_size
    is_scored = (tokens >= tl.load(absent_ptr + owner)) & (tokens < num_scored)
    pooled = tl.where(is_scored, pooled, 0.0)
    tl.store(pooled_ptr + owner * num_wanted + tokens, pooled, mask=tokens < num_wanted)
