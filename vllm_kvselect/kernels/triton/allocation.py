"""Allocation; `share_out` of `vllm_kvselect/selecting/allocation.py`.

One search over all heads of a segment needs all SMs, and so a launch for every digit of its keys.
All segments are searched at once.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_kvselect.kernels.triton.ordering import DIGITS, digit_counts, next_digit, sortable, take
from vllm_kvselect.kernels.triton.selection import rows
from vllm_kvselect.scoring.numbers import on_device
from vllm_kvselect.selecting import allocation

_BLOCK = 1024
"""Tokens in a program, and in a row of the table of ties."""

_ROWS = 8
"""Heads of which a program looks at a tile at once."""

_HEADS = 256
"""As many heads as most segments have at most: kernels are compiled for no fewer."""

_CELLS = 4096
"""Counts of tiles and heads that a program adds up at once."""

_NUM_WARPS = 8

_VARYING = ["segment_stride", "head_stride", "num_tokens", "num_heads"]


def share_out(
    scores: torch.Tensor, num_packed: Sequence[int], block_size: int, share: int, unit: int
) -> torch.Tensor:
    """Twin of `allocation.share_out`."""
    if scores.dtype != torch.float32:
        return allocation.share_out(scores, num_packed, block_size, share, unit)
    scores = rows(scores)
    num_segments, num_heads, num_tokens = scores.shape
    num_tiles, device = triton.cdiv(num_tokens, _BLOCK), scores.device
    digits = torch.zeros(num_segments, DIGITS.value, 256, dtype=torch.int32, device=device)
    counts = torch.empty(2, num_segments, num_tiles, num_heads, dtype=torch.int32, device=device)
    pages = torch.empty(num_segments, num_heads, dtype=torch.int64, device=device)
    even = on_device([blocks * block_size for blocks in num_packed], device)
    inputs = (scores, *scores.stride()[:2], num_tokens, even, num_heads, digits)
    grid = (num_tiles, triton.cdiv(num_heads, _ROWS), num_segments)
    tile = {"DIGITS": DIGITS.value, "ROWS": _ROWS, "BLOCK": _BLOCK, "num_warps": _NUM_WARPS}
    for digit in range(DIGITS.value):
        _digits_kernel[grid](*inputs, DIGIT=digit, **tile)
    _counts_kernel[grid](*inputs, counts, **tile)
    heads = max(_HEADS, triton.next_power_of_2(num_heads))
    _pages_kernel[(num_segments,)](
        *inputs,
        counts,
        share,
        unit,
        unit * block_size,
        pages,
        HEADS=heads,
        TILES=max(1, _CELLS // heads),
        **tile,
    )
    return pages


@triton.jit
def _cut_so_far(digits_ptr, rank, DIGITS: tl.constexpr):
    """The first digits of the cut, and the rank among the keys that agree with them."""
    cut = tl.full((), 0, tl.uint32)
    for digit in tl.static_range(DIGITS):
        counts = tl.load(digits_ptr + digit * 256 + tl.arange(0, 256))
        cut, rank = next_digit(cut, rank, counts, digit)
    return cut, rank


@triton.jit
def _keys(scores_ptr, stride, num_heads, num_tokens, first, tokens, ROWS: tl.constexpr):
    """Keys of some heads and tokens, `[ROWS, num_tokens]`, and which of them there are."""
    heads = first + tl.arange(0, ROWS)
    inside = (heads < num_heads)[:, None] & (tokens < num_tokens)[None, :]
    places = heads[:, None].to(tl.int64) * stride + tokens[None, :]
    return sortable(tl.load(scores_ptr + places, mask=inside, other=0.0)), inside


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["scores_ptr"])
def _digits_kernel(
    scores_ptr,
    segment_stride,
    head_stride,
    num_tokens,
    even_ptr,
    num_heads,
    digits_ptr,
    DIGIT: tl.constexpr,
    DIGITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts the values of a digit among the keys that agree with the digits before it."""
    tokens, first = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * ROWS
    segment = tl.program_id(2).to(tl.int64)
    scores_ptr += segment * segment_stride
    digits_ptr += segment * (DIGITS * 256)
    keys, inside = _keys(scores_ptr, head_stride, num_heads, num_tokens, first, tokens, ROWS)
    num_best = tl.load(even_ptr + segment).to(tl.int32) * num_heads
    cut, _ = _cut_so_far(digits_ptr, num_best, DIGIT)
    flat = tl.reshape(keys, (ROWS * BLOCK,)), tl.reshape(inside, (ROWS * BLOCK,))
    counts = digit_counts(flat[0], flat[1], cut, DIGIT)
    values = tl.arange(0, 256)
    tl.atomic_add(digits_ptr + DIGIT * 256 + values, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["scores_ptr"])
def _counts_kernel(
    scores_ptr,
    segment_stride,
    head_stride,
    num_tokens,
    even_ptr,
    num_heads,
    digits_ptr,
    counts_ptr,
    DIGITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys above the cut, and keys that equal it, of every tile and head."""
    tile, first, segment = tl.program_id(0), tl.program_id(1) * ROWS, tl.program_id(2).to(tl.int64)
    tokens = tile * BLOCK + tl.arange(0, BLOCK)
    scores_ptr += segment * segment_stride
    keys, inside = _keys(scores_ptr, head_stride, num_heads, num_tokens, first, tokens, ROWS)
    num_best = tl.load(even_ptr + segment).to(tl.int32) * num_heads
    cut, _ = _cut_so_far(digits_ptr + segment * (DIGITS * 256), num_best, DIGITS)
    heads, num_tiles = first + tl.arange(0, ROWS), tl.num_programs(0)
    places = (segment * num_tiles + tile) * num_heads + heads
    above = tl.sum((inside & (keys > cut)).to(tl.int32), 1)
    tl.store(counts_ptr + places, above, mask=heads < num_heads)
    places += tl.num_programs(2).to(tl.int64) * num_tiles * num_heads
    ties = tl.sum((inside & (keys == cut)).to(tl.int32), 1)
    tl.store(counts_ptr + places, ties, mask=heads < num_heads)


@triton.jit(
    do_not_specialize=[*_VARYING, "share", "unit", "page"],
    do_not_specialize_on_alignment=["scores_ptr"],
)
def _pages_kernel(
    scores_ptr,
    segment_stride,
    head_stride,
    num_tokens,
    even_ptr,
    num_heads,
    digits_ptr,
    counts_ptr,
    share,
    unit,
    page,
    pages_ptr,
    HEADS: tl.constexpr,
    TILES: tl.constexpr,
    DIGITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Shares out a segment's ties, the earlier token first, then the lower head, and rounds."""
    segment, num_segments = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    num_tiles, heads = tl.cdiv(num_tokens, BLOCK), tl.arange(0, HEADS)
    is_head, even = heads < num_heads, tl.load(even_ptr + segment)
    digits_ptr += segment * (DIGITS * 256)
    cut, num_ties = _cut_so_far(digits_ptr, even.to(tl.int32) * num_heads, DIGITS)
    scores_ptr += segment * segment_stride
    counts_ptr += segment * num_tiles * num_heads
    ties_ptr = counts_ptr + num_segments.to(tl.int64) * num_tiles * num_heads

    # Tiles whose ties are all taken, up to the one in which they run out.
    counts, last_tile = tl.zeros((HEADS,), tl.int32), num_tiles
    for first in range(0, num_tiles, TILES):
        tiles = first + tl.arange(0, TILES)
        places = tiles[:, None] * num_heads + heads[None, :]
        inside = (tiles < num_tiles)[:, None] & is_head[None, :]
        above = tl.load(counts_ptr + places, mask=inside, other=0)
        ties = tl.load(ties_ptr + places, mask=inside, other=0)
        of_tiles = tl.sum(ties, 1)
        fits = (tl.cumsum(of_tiles, 0) <= num_ties) & (last_tile == num_tiles)
        counts += tl.sum(above + tl.where(fits[:, None], ties, 0), 0)
        num_ties -= tl.sum(tl.where(fits, of_tiles, 0))
        misfits = tl.where(fits | (tiles >= num_tiles), num_tiles, tiles)
        last_tile = tl.minimum(last_tile, tl.min(misfits, 0))

    # In that one, tokens whose ties are all taken, up to the one in which they run out.
    tokens = last_tile * BLOCK + tl.arange(0, BLOCK)
    is_left = (num_ties > 0) & (last_tile < num_tiles)
    ties_ptr += last_tile * num_heads
    ties = tl.load(ties_ptr + heads, mask=is_head & is_left, other=0)
    of_tokens = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, tl.where(is_left, num_heads, 0), ROWS):
        if tl.sum(tl.where((heads >= first) & (heads < first + ROWS), ties, 0)) > 0:
            keys, inside = _keys(
                scores_ptr, head_stride, num_heads, num_tokens, first, tokens, ROWS
            )
            of_tokens += tl.sum((inside & (keys == cut)).to(tl.int32), 0)
    fits = tl.cumsum(of_tokens, 0) <= num_ties
    is_border = tl.arange(0, BLOCK) == tl.sum(fits.to(tl.int32))
    num_ties -= tl.sum(tl.where(fits, of_tokens, 0))
    for first in range(0, tl.where(is_left, num_heads, 0), ROWS):
        if tl.sum(tl.where((heads >= first) & (heads < first + ROWS), ties, 0)) > 0:
            keys, inside = _keys(
                scores_ptr, head_stride, num_heads, num_tokens, first, tokens, ROWS
            )
            tied = (inside & (keys == cut)).to(tl.int32)
            at_border = tl.sum(tl.where(is_border[None, :], tied, 0), 1)
            taken = tl.where(tl.cumsum(at_border, 0) <= num_ties, at_border, 0)
            num_ties -= tl.sum(taken)
            taken += tl.sum(tl.where(fits[None, :], tied, 0), 1)
            is_own = heads[:, None] == (first + tl.arange(0, ROWS))[None, :]
            counts += tl.sum(tl.where(is_own, taken[None, :], 0), 1)

    budgets = counts.to(tl.int64) * (unit - share) + even * share
    budgets = tl.where(is_head, budgets, 0)
    whole = budgets // page
    remainder = budgets - whole * page
    num_left, cut = (tl.sum(remainder) // page).to(tl.int32), tl.full((), 0, tl.uint32)
    keys = remainder.to(tl.uint32)
    for digit in tl.static_range(DIGITS):
        values = digit_counts(keys, is_head, cut, digit)
        cut, num_left = next_digit(cut, num_left, values, digit)
    is_up, _ = take(keys, is_head, cut, num_left)
    tl.store(pages_ptr + segment * num_heads + heads, whole + is_up, mask=is_head)
