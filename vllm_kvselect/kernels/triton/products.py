"""Matrix products of tiles, accumulated in float32, and how large a tile may be."""

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

_TILE_BYTES = 2**15
"""An operand's tile: two of them, one in three stages, fit the shared memory of an SM (227 KiB)."""


@triton.jit
def multiply(left, right):
    """The product `[m, n]` of tiles `[m, k]` and `[k, n]`, in float32."""
    if INTERPRETED:
        # Triton's interpreter multiplies the bits of bfloat16 as integers.
        left, right = left.to(tl.float32), right.to(tl.float32)
    # Says how float32 is multiplied: in three products of TF32, which lose about a bit of it. One
    # would round inputs to 11 bits, and float32 itself has no tensor cores.
    return tl.dot(left, right, input_precision="tf32x3")


def padded(size: int) -> int:
    """The power of two that a tile needs for `size` channels or rows; `tl.dot` wants 16 or more."""
    power: int = triton.next_power_of_2(size)
    return max(16, power)


def tile_size(channels: int, dtype: torch.dtype, largest: int) -> int:
    """Rows of a tile with so many channels, a power of two from 16 to `largest`."""
    # Three products of TF32 need the high and the low parts of float32.
    width = 2 * dtype.itemsize if dtype == torch.float32 else dtype.itemsize
    return max(16, min(largest, _TILE_BYTES // (channels * width)))
