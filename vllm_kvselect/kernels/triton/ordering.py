"""The best of a row without sorting it: a radix search for the cut, then one pass.

The order is that of `torch.sort(descending=True, stable=True)`: the earlier of equals first.
"""

import triton
import triton.language as tl

DIGITS = tl.constexpr(4)
"""Digits of 8 bits in a key, the highest first."""


@triton.jit
def sortable(values):
    """Keys, uint32 in the order of float32 values; what is no number comes first."""
    bits = values.to(tl.uint32, bitcast=True)
    # Not `~bits`: the interpreter of Triton 3.8 makes -1 of it.
    keys = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    keys = tl.where(values == 0, 0x80000000, keys)  # one zero
    return tl.where(values == values, keys, 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def digit_counts(keys, inside, cut, DIGIT: tl.constexpr):
    """How many keys that agree with the cut so far have which value of a digit, `[256]` int32."""
    SHIFT: tl.constexpr = 24 - 8 * DIGIT
    # Two shifts, since a shift by 32 is undefined.
    agree = (keys >> SHIFT) >> 8 == (cut >> SHIFT) >> 8
    digits = ((keys >> SHIFT) & 255).to(tl.int32)
    return tl.histogram(digits, 256, mask=inside & agree)


@triton.jit
def next_digit(cut, rank, counts, DIGIT: tl.constexpr):
    """Adds a digit to the cut.

    The cut is the key of rank `rank`, counted from 1 among the keys that agree with it so far; the
    rank returned counts those that agree with the new digit too.
    """
    values = tl.arange(0, 256)
    at_least = tl.cumsum(counts, 0, reverse=True)
    digit = tl.maximum(tl.sum((at_least >= rank).to(tl.int32)) - 1, 0)
    rank -= tl.sum(tl.where(values > digit, counts, 0))
    return cut | (digit.to(tl.uint32) << (24 - 8 * DIGIT)), rank


@triton.jit
def find_cut(row_ptr, num_tokens, count, BLOCK: tl.constexpr):
    """The cut of the `count` best of a row: all above it, and the first `num_ties` that equal it.

    A count of 0 is cut above everything, with no ties.
    """
    cut = tl.full((), 0, tl.uint32)
    num_ties = count
    for digit in tl.static_range(DIGITS):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, num_tokens, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            keys = sortable(tl.load(row_ptr + tokens, mask=tokens < num_tokens, other=0.0))
            counts += digit_counts(keys, tokens < num_tokens, cut, digit)
        cut, num_ties = next_digit(cut, num_ties, counts, digit)
    return cut, num_ties


@triton.jit
def take(keys, inside, cut, num_ties):
    """Which keys of the next tile are among the best, and how many ties are left after it."""
    ties = inside & (keys == cut)
    taken = (inside & (keys > cut)) | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= num_ties))
    return taken, num_ties - tl.sum(ties.to(tl.int32))


@triton.jit
def append(out_ptr, num_written, elements, taken):
    """Writes the taken elements behind those written before, and counts them all."""
    places = num_written + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(out_ptr + places, elements, mask=taken)
    return num_written + tl.sum(taken.to(tl.int32))
