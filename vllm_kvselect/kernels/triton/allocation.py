"""Allocation; `adaptive_pages` and `shared_pages` of `vllm_kvselect/selecting/allocation.py`.

One search over all heads needs all SMs, and so a launch for every digit of its keys.
"""

import torch
import triton
import triton.language as tl

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels.triton.ordering import DIGITS, digit_counts, next_digit, sortable
from vllm_kvselect.kernels.triton.selection import best_mask, rows
from vllm_kvselect.scopes import Floor
from vllm_kvselect.selecting import allocation

_BLOCK = 2048
"""Tokens of one head in a program, and in a row of the table of ties."""

_CELLS = 4096
"""Elements of a tile of (token, head) pairs that is walked in order."""


def adaptive_pages(
    scores: torch.Tensor, num_packed: int, block_size: int, config: EvictionConfig
) -> torch.Tensor:
    """Twin of `allocation.adaptive_pages`."""
    if scores.dtype != torch.float32:
        return allocation.adaptive_pages(scores, num_packed, block_size, config)
    even = num_packed * block_size
    parameters = config.of(Floor)
    if parameters.floor == "minimum":
        counts = torch.full_like(scores[:, 0], int(parameters.safeguard * even), dtype=torch.int64)
        # What is not there stays so: a head may have fewer entries than the floor.
        is_first = best_mask(scores, counts) & (scores > float("-inf"))
        scores = scores.masked_fill(is_first, float("inf"))
        return _pages(scores, even, 1, 0, block_size)
    unit = allocation.SAFEGUARD_UNIT
    share = round(parameters.safeguard * unit)
    return _pages(scores, even, unit - share, share, unit * block_size)


def shared_pages(
    scores: torch.Tensor, num_packed: int, block_size: int, config: EvictionConfig
) -> torch.Tensor:
    """Twin of `allocation.shared_pages`."""
    if scores.dtype != torch.float32:
        return allocation.shared_pages(scores, num_packed, block_size, config)
    return _pages(scores, num_packed * block_size, 1, 0, block_size)


def _pages(scores: torch.Tensor, even: int, factor: int, share: int, unit: int) -> torch.Tensor:
    """Budgets `factor * count + share * even` in whole `unit`s; counts are of the best entries."""
    scores = rows(scores)
    num_heads, num_tokens = scores.shape
    num_best, num_tiles = even * num_heads, triton.cdiv(num_tokens, _BLOCK)
    digits = torch.zeros(DIGITS.value, 256, dtype=torch.int32, device=scores.device)
    counts = torch.empty(2, num_tiles, num_heads, dtype=torch.int32, device=scores.device)
    pages = torch.empty(num_heads, dtype=torch.int64, device=scores.device)
    inputs = (scores, scores.stride(0), num_tokens, num_best, digits)
    for digit in range(DIGITS.value):
        _digits_kernel[(num_tiles, num_heads)](*inputs, DIGIT=digit, BLOCK=_BLOCK)
    _counts_kernel[(num_tiles, num_heads)](*inputs, counts, DIGITS=DIGITS.value, BLOCK=_BLOCK)
    heads = triton.next_power_of_2(num_heads)
    _pages_kernel[(1,)](
        *inputs,
        counts,
        num_heads,
        factor,
        share,
        even,
        unit,
        pages,
        DIGITS=DIGITS.value,
        HEADS=heads,
        BLOCK=_BLOCK,
        STEP=min(_BLOCK, max(1, _CELLS // heads)),
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


@triton.jit(
    do_not_specialize=["stride", "num_tokens", "num_best"],
    do_not_specialize_on_alignment=["scores_ptr"],
)
def _digits_kernel(
    scores_ptr,
    stride,
    num_tokens,
    num_best,
    digits_ptr,
    DIGIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts the values of a digit among the keys that agree with the digits before it."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < num_tokens
    scores_ptr += tl.program_id(1).to(tl.int64) * stride
    keys = sortable(tl.load(scores_ptr + tokens, mask=inside, other=0.0))
    cut, _ = _cut_so_far(digits_ptr, num_best, DIGIT)
    counts = digit_counts(keys, inside, cut, DIGIT)
    values = tl.arange(0, 256)
    tl.atomic_add(digits_ptr + DIGIT * 256 + values, counts, mask=counts > 0, sem="relaxed")


@triton.jit(
    do_not_specialize=["stride", "num_tokens", "num_best"],
    do_not_specialize_on_alignment=["scores_ptr"],
)
def _counts_kernel(
    scores_ptr,
    stride,
    num_tokens,
    num_best,
    digits_ptr,
    counts_ptr,
    DIGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys above the cut, and keys that equal it, of every tile and head."""
    tile, head = tl.program_id(0), tl.program_id(1)
    num_tiles, num_heads = tl.num_programs(0), tl.num_programs(1)
    tokens = tile * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < num_tokens
    scores_ptr += head.to(tl.int64) * stride
    keys = sortable(tl.load(scores_ptr + tokens, mask=inside, other=0.0))
    cut, _ = _cut_so_far(digits_ptr, num_best, DIGITS)
    place = tile * num_heads + head
    tl.store(counts_ptr + place, tl.sum((inside & (keys > cut)).to(tl.int32)))
    place += num_tiles * num_heads
    tl.store(counts_ptr + place, tl.sum((inside & (keys == cut)).to(tl.int32)))


@triton.jit(
    do_not_specialize=["stride", "num_tokens", "num_best", "factor", "share", "even", "unit"],
    do_not_specialize_on_alignment=["scores_ptr"],
)
def _pages_kernel(
    scores_ptr,
    stride,
    num_tokens,
    num_best,
    digits_ptr,
    counts_ptr,
    num_heads,
    factor,
    share,
    even,
    unit,
    pages_ptr,
    DIGITS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Shares out the ties, the earlier token first, then the lower head, and rounds to pages."""
    cut, num_ties = _cut_so_far(digits_ptr, num_best, DIGITS)
    heads = tl.arange(0, HEADS)
    is_head = heads < num_heads
    num_tiles = tl.cdiv(num_tokens, BLOCK)
    counts = tl.zeros((HEADS,), tl.int32)
    # Tiles whose ties are all taken, up to the one in which they run out.
    last_tile = num_tiles
    for tile in range(num_tiles):
        places = tile * num_heads + heads
        counts += tl.load(counts_ptr + places, mask=is_head, other=0)
        ties = tl.load(counts_ptr + num_tiles * num_heads + places, mask=is_head, other=0)
        fits = (last_tile == num_tiles) & (tl.sum(ties) <= num_ties)
        last_tile = tl.where(fits | (last_tile < num_tiles), last_tile, tile)
        counts += tl.where(fits, ties, 0)
        num_ties -= tl.where(fits, tl.sum(ties), 0)
    for start in range(last_tile * BLOCK, tl.minimum((last_tile + 1) * BLOCK, num_tokens), STEP):
        tokens = start + tl.arange(0, STEP)
        inside = (tokens < num_tokens)[:, None] & is_head[None, :]
        places = heads[None, :].to(tl.int64) * stride + tokens[:, None]
        keys = sortable(tl.load(scores_ptr + places, mask=inside, other=0.0))
        ties = (inside & (keys == cut)).to(tl.int32)
        of_tokens = tl.sum(ties, 1)
        rank = (tl.cumsum(of_tokens, 0) - of_tokens)[:, None] + tl.cumsum(ties, 1)
        counts += tl.sum(tl.where(rank <= num_ties, ties, 0), 0)
        num_ties -= tl.sum(of_tokens)

    budgets = tl.where(is_head, counts.to(tl.int64) * factor + share.to(tl.int64) * even, 0)
    whole = budgets // unit
    remainder = budgets - whole * unit
    num_before = tl.zeros((HEADS,), tl.int32)
    for other in range(num_heads):
        others = tl.sum(tl.where(heads == other, remainder, 0))
        ahead = (others > remainder) | ((others == remainder) & (other < heads))
        num_before += ahead.to(tl.int32)
    pages = whole + (num_before < tl.sum(remainder) // unit).to(tl.int64)
    tl.store(pages_ptr + heads, pages, mask=is_head)
