"""Pooling along the tokens; `max_pool` and `mean_pool` of `vllm_kvselect/scoring/snapkv.py`."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def pool(scores: torch.Tensor, pooling: str, kernel_size: int) -> torch.Tensor:
    """The maximum or the mean over `kernel_size` neighbouring tokens.

    Args:
        scores: `[num_kv_heads, num_tokens]`, contiguous float32.
        pooling: `max`, or `mean`, for which zeros are beyond both ends.
        kernel_size: Odd.

    Returns:
        A tensor of the same shape.
    """
    if kernel_size == 1 or not scores.numel():
        return scores
    pooled = torch.empty_like(scores)
    num_heads, num_tokens = scores.shape
    _pool_kernel[(triton.cdiv(num_tokens, _BLOCK), num_heads)](
        scores, num_tokens, kernel_size, pooled, LARGEST=pooling == "max", BLOCK=_BLOCK
    )
    return pooled


@triton.jit(do_not_specialize=["num_tokens"])
def _pool_kernel(
    scores_ptr, num_tokens, kernel_size, pooled_ptr, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scores_ptr += head * num_tokens
    pooled = tl.full((BLOCK,), float("-inf") if LARGEST else 0.0, tl.float32)
    for offset in range(kernel_size):
        near = tokens + offset - kernel_size // 2
        inside = (near >= 0) & (near < num_tokens)
        if LARGEST:
            pooled = tl.maximum(
                pooled, tl.load(scores_ptr + near, mask=inside, other=float("-inf"))
            )
        else:
            pooled += tl.load(scores_ptr + near, mask=inside, other=0.0)
    if not LARGEST:
        pooled /= kernel_size
    tl.store(pooled_ptr + head * num_tokens + tokens, pooled, mask=tokens < num_tokens)
