"""Projected value norms (arXiv 2502.03805, Theorem 2): what an entry can add to the output."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch

_BLOCK_BYTES = 2**23
"""Size of the block of `V W_O` that is alive at once; larger ones are hardly faster."""


class OutputProjection(NamedTuple):
    """A layer's W_O, prepared for norms.

    Attributes:
        weight: By KV head and query head of its group, `[num_kv_heads, head_size, group,
            hidden_size]`, contiguous, in the activations' dtype.
        bound_form: A quadratic form that bounds squared L2 norms, rounding included: the mean over
            the group of `W_O W_O^T` and a slack on its diagonal,
            `[num_kv_heads, head_size, head_size]`.
        packed: The weight in the order in which the kernels of a device read it, or None. Where it
            is there, nobody reads `weight`, which may have a shape only (device "meta").
    """

    weight: torch.Tensor
    bound_form: torch.Tensor
    packed: torch.Tensor | None = None

    @classmethod
    def of(cls, weight: torch.Tensor) -> Self:
        """Prepares a weight of the shape given above."""
        head_size, form = weight.shape[1], _mean_square(weight)
        # Evaluating v F v^T rounds F, v F and the products to the dtype of v, one eps each at
        # most, and costs one eps of the accumulator a term; all relative to |v| |F| |v|, which
        # the largest row sum of |F| bounds.
        slack = 4 * torch.finfo(weight.dtype).eps + 2 * head_size * torch.finfo(form.dtype).eps
        largest = form.abs().sum(dim=-1).amax(dim=-1, keepdim=True)
        form.diagonal(dim1=1, dim2=2).add_(largest * slack)
        # Squares leave float16's range; a bound that overflows to NaN would drop entries.
        is_narrow = weight.dtype == torch.float16
        return cls(weight, form if is_narrow else form.to(weight.dtype))


def _mean_square(weight: torch.Tensor) -> torch.Tensor:
    """The mean over the group of `W_O W_O^T`, at least float32."""
    wide = weight.flatten(2).to(torch.promote_types(weight.dtype, torch.float32))
    return torch.bmm(wide, wide.transpose(1, 2)) / weight.shape[2]


def side_by_side(projections: Sequence[OutputProjection]) -> list[OutputProjection]:
    """The same projections of layers, one after the other in one piece of memory.

    Kernels that take all layers at once then need no second copy. Those of different shapes stay
    where they are.
    """
    if len({each.weight.shape for each in projections}) != 1:
        return [*projections]
    names = ("weight", "bound_form")
    parts = [torch.stack([getattr(each, name) for each in projections]) for name in names]
    return [OutputProjection(*layer) for layer in zip(*parts, strict=True)]


def projected_value_norms(value: torch.Tensor, projection: OutputProjection) -> torch.Tensor:
    """`value_norms` of a prepared W_O; arguments and result as there."""
    return value_norms(value, projection.weight)


def projected_value_l2_norms(value: torch.Tensor, projection: OutputProjection) -> torch.Tensor:
    """L2 norm of each value projected through its query heads' output projection, `||V W_O||_2`.

    The root of the mean square over the query group: a quadratic form of the value alone, so that
    nothing is projected. For values of a model it differs from the L1 norm by hardly more than a
    factor that all entries of a layer share.

    Args:
        value: `[num_kv_heads, num_tokens, head_size]`.
        projection: The layer's W_O.

    Returns:
        `[num_kv_heads, num_tokens]`, at least float32.
    """
    form = _mean_square(projection.weight)
    wide = value.to(form.dtype)
    return (wide @ form).mul_(wide).sum(dim=-1).clamp_(min=0).sqrt_()


def value_norms(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """L1 norm of each value projected through its query heads' output projection, `||V W_O||_1`.

    The mean over the query group, as in the authors' code. `V W_O` is never materialised for more
    than a block of tokens.

    Args:
        value: `[num_kv_heads, num_tokens, head_size]`.
        weight: W_O as in `OutputProjection`, same dtype as `value`.

    Returns:
        `[num_kv_heads, num_tokens]`, at least float32. With bfloat16 inputs the products and
        their sum are rounded to bfloat16: relative error below 2**-7.
    """
    num_kv_heads, num_tokens, _ = value.shape
    group, hidden_size = weight.shape[2:]
    projection = weight.flatten(2)
    # The row sums run through the matrix unit too: several times faster than a reduction on CPU.
    # Weights of about 1 / width keep them in float16's range; powers of two lose no digit.
    width = group * hidden_size
    sum_scale = 1 << (width - 1).bit_length()
    weights = value.new_full((width, 1), 1 / sum_scale)
    dtype = torch.promote_types(value.dtype, torch.float32)
    norms = value.new_empty(num_kv_heads, num_tokens, dtype=dtype)
    step = max(1, _BLOCK_BYTES // (num_kv_heads * width * value.element_size()))
    for start in range(0, num_tokens, step):
        projected = torch.bmm(value[:, start : start + step], projection).abs_()
        norms[:, start : start + step] = (projected @ weights).squeeze(-1)
    return norms.mul_(sum_scale / group)
