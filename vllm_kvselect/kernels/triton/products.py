"""Matrix products of tiles, accumulated in float32, and how large a tile may be."""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

_MOST_TILES, _LARGEST_TILE = 5, 2**15
"""A program holds one operand of two tiles, and tiles of the other in three stages."""
_ROOM = 2**11
"""Bytes of shared memory that reductions take beside tiles."""
_H100 = 227 * 2**10
"""Shared memory of a block there."""
_H100_PROCESSORS = 132


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


def shared_bytes() -> int:
    """The most shared memory that a program may have on this device."""
    if INTERPRETED.value:
        return _H100
    driver = triton.runtime.driver.active
    return _property(driver, driver.get_current_device(), "max_shared_mem")


def num_processors() -> int:
    """Multiprocessors of this device; of an H100, where none is asked."""
    if INTERPRETED.value:
        return _H100_PROCESSORS
    driver = triton.runtime.driver.active
    return _property(driver, driver.get_current_device(), "multiprocessor_count")


@cache
def _property(driver: Any, device: int, name: str) -> int:
    return int(driver.utils.get_device_properties(device)[name])


def tile_bytes() -> int:
    """Bytes of an operand's tile: 32 KiB, or half of it where that does not fit (99 KiB cards)."""
    size = _LARGEST_TILE
    while _MOST_TILES * size + _ROOM > shared_bytes():
        size //= 2
    return size


def tile_size(channels: int, dtype: torch.dtype, largest: int) -> int:
    """Rows of a tile with so many channels, a power of two from 16 to `largest`."""
    # Three products of TF32 need the high and the low parts of float32.
    width = 2 * dtype.itemsize if dtype == torch.float32 else dtype.itemsize
    return max(16, min(largest, tile_bytes() // (channels * width)))


def num_stages(channels: int, dtype: torch.dtype) -> int:
    """Stages in which tiles are loaded: two where the smallest tile is larger than it should be."""
    return 3 if 16 * channels * dtype.itemsize <= tile_bytes() // 2 else 2
