"""Projected value norms (arXiv 2502.03805, Theorem 2): what an entry can add to the output."""

import torch

_BLOCK_BYTES = 2**22
"""Size of the block of `V W_O` that is alive at once: larger than that leaves the CPU's cache."""


def value_norms(value: torch.Tensor, output_projection: torch.Tensor) -> torch.Tensor:
    """L1 norm of each value projected through its query heads' output projection, `||V W_O||_1`.

    The mean over the query group, as in the authors' code. `V W_O` is never materialised for more
    than a block of tokens.

    Args:
        value: `[num_kv_heads, num_tokens, head_size]`.
        output_projection: W_O by KV head and query head of its group,
            `[num_kv_heads, head_size, group, hidden_size]`, contiguous, same dtype as `value`.

    Returns:
        `[num_kv_heads, num_tokens]`, at least float32. With bfloat16 inputs the products and the
        sum of each query head are rounded to bfloat16: relative error below 2**-7.
    """
    num_kv_heads, num_tokens, _ = value.shape
    group, hidden_size = output_projection.shape[2:]
    projection = output_projection.flatten(2)
    # The row sums run through the matrix unit too: several times faster than a reduction on CPU.
    # Weights of about 1 / hidden_size keep them in float16's range; powers of two lose no digit.
    sum_scale = 1 << (hidden_size - 1).bit_length()
    weights = value.new_full((hidden_size, 1), 1 / sum_scale)
    dtype = torch.promote_types(value.dtype, torch.float32)
    norms = value.new_empty(num_kv_heads, num_tokens, dtype=dtype)
    row_bytes = num_kv_heads * projection.shape[2] * value.element_size()
    step = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, num_tokens, step):
        projected = torch.bmm(value[:, start : start + step], projection).abs_()
        sums = projected.view(num_kv_heads, -1, group, hidden_size) @ weights
        norms[:, start : start + step] = sums.to(dtype).mean(dim=(-2, -1)) * sum_scale
    return norms
