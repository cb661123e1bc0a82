"""Projected value norms of all rows; those of `vllm_kvselect/scoring/value_norms.py`.

A tile of `V W_O` lives in registers until its magnitudes are summed up. W_O streams from the L2
cache once for every tile of entries, so those are as large as registers allow, and programs that
run side by side have the same head. There are as many programs as multiprocessors: each goes
through the list of all tiles, so that none waits for the last ones, and tiles without an entry take
no time.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_kvselect.kernels.triton.paged import CODES, UNSPECIALISED, empty, paged, places_of, read
from vllm_kvselect.kernels.triton.products import (
    multiply,
    num_processors,
    num_stages,
    padded,
    tile_size,
)
from vllm_kvselect.scoring.held import Held


def projected_value_norms(held: Held) -> torch.Tensor:
    """Twin of `value_norms.projected_value_norms`, over rows; sums are float32 throughout."""
    norms = empty(held)
    launch_norms(held, norms)
    return norms


def launch_norms(held: Held, norms: torch.Tensor, **lists: Any) -> None:
    """Computes norms of all columns, or of those that are listed.

    Args:
        held: What requests hold.
        norms: `[num_rows, num_kv_heads, num_competing]` float32, written.
        **lists: Which columns, and what becomes of them; see the kernel.
    """
    projections, dtype = held.paged.projections, held.paged.dtype
    assert projections is not None
    weight = projections.weight
    channels = padded(weight.shape[2])
    block = tile_size(channels, dtype, 128)
    # Twice as many bytes of values, which are read once.
    tokens = 2 * block
    num_items = held.num_rows * held.num_kv_heads * triton.cdiv(held.num_competing, tokens)
    if not num_items:
        return
    nothing: dict[str, Any] = dict.fromkeys(
        ("listed_ptr", "counts_ptr", "weights_ptr", "keys_ptr", "bounds_ptr")
    )
    _norms_kernel[(min(num_items, num_processors()),)](
        **paged(held),
        projection_ptr=weight,
        width=weight.shape[3] * weight.shape[4],
        group=weight.shape[3],
        num_items=num_items,
        norms_ptr=norms,
        **{**nothing, "eps": 0.0, **lists},
        TOKENS=tokens,
        COLUMNS=block,
        CHANNELS=channels,
        num_warps=8,
        num_stages=num_stages(channels, dtype),
    )


def quadratic_forms(
    held: Held,
    forms: torch.Tensor,
    factor: float,
    weights: torch.Tensor,
    eps: float,
    taken: torch.Tensor,
) -> torch.Tensor:
    """`factor * sqrt(v F v^T)` of every value v, times weights.

    Args:
        held: What requests hold.
        forms: F, `[num_layers, num_kv_heads, head_size, head_size]`.
        factor: As above.
        weights: `[num_rows, num_kv_heads, num_competing]` float32, contiguous.
        eps: Added to them.
        taken: Entries that get -1 instead, bool, contiguous.

    Returns:
        `[num_rows, num_kv_heads, num_competing]` float32.
    """
    found, channels = empty(held), padded(forms.shape[2])
    block = tile_size(channels, forms.dtype, 128)
    if not found.numel():
        return found
    num_owners = held.num_rows * held.num_kv_heads
    _forms_kernel[(num_owners * triton.cdiv(held.num_competing, block),)](
        **paged(held),
        forms_ptr=forms,
        factor=factor,
        weights_ptr=weights,
        eps=eps,
        taken_ptr=taken,
        found_ptr=found,
        TOKENS=block,
        COLUMNS=min(block, 64, channels),
        CHANNELS=channels,
        num_stages=2,
    )
    return found


@triton.jit(do_not_specialize=[*UNSPECIALISED, "num_items"])
def _norms_kernel(
    memory_ptr,
    codes_ptr,
    pages_ptr,
    pages_width,
    absent_ptr,
    num_competing,
    num_layers,
    num_heads,
    projection_ptr,
    width,
    group,
    num_items,
    norms_ptr,
    listed_ptr,
    counts_ptr,
    weights_ptr,
    keys_ptr,
    bounds_ptr,
    eps,
    PAGE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Norms of all columns; or of listed ones, with what they make of the weights beside.

    Of listed columns, `keys` gets `(weight + eps) * norm` at the place in the list, and `bounds` -1
    at the column: it is out of the running.
    """
    tiles_of_owner = tl.cdiv(num_competing, TOKENS)
    channels = tl.arange(0, CHANNELS)
    is_channel = channels < HEAD_SIZE
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        owner, tile = (item // tiles_of_owner).to(tl.int64), item % tiles_of_owner
        layer = owner // num_heads % num_layers
        count = num_competing
        if listed_ptr is not None:
            count = tl.load(counts_ptr + owner)
        if tile * TOKENS < count:
            places = tile * TOKENS + tl.arange(0, TOKENS)
            inside = places < count
            columns = places
            if listed_ptr is not None:
                listed = listed_ptr + owner * num_competing + places
                columns = tl.load(listed, mask=inside, other=0)
            present = inside & (columns >= tl.load(absent_ptr + owner).to(tl.int32))
            slots = places_of(pages_ptr, pages_width, owner, columns, present, PAGE)
            elements = (slots * (2 * HEAD_SIZE) + HEAD_SIZE)[:, None] + channels[None, :]
            mask = present[:, None] & is_channel[None, :]
            codes = codes_ptr
            if codes_ptr is not None:
                codes = codes_ptr + layer * CODES + 256
            values = read(memory_ptr, elements, mask, codes)
            rows = projection_ptr + (layer * num_heads + owner % num_heads) * HEAD_SIZE * width
            rows += channels[:, None] * width
            norms = tl.zeros((TOKENS,), tl.float32)
            for start in range(0, width, COLUMNS):
                outputs = start + tl.arange(0, COLUMNS)
                weights = tl.load(
                    rows + outputs[None, :],
                    mask=is_channel[:, None] & (outputs < width)[None, :],
                    other=0.0,
                )
                norms += tl.sum(tl.abs(multiply(values, weights)), 1)
            norms /= group
            tl.store(norms_ptr + owner * num_competing + columns, norms, mask=inside)
            if listed_ptr is not None:
                given = weights_ptr + owner * num_competing + columns
                keys = (tl.load(given, mask=inside, other=0.0) + eps) * norms
                tl.store(keys_ptr + owner * num_competing + places, keys, mask=inside)
                out = tl.full((TOKENS,), -1.0, tl.float32)
                tl.store(bounds_ptr + owner * num_competing + columns, out, mask=inside)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _forms_kernel(
    memory_ptr,
    codes_ptr,
    pages_ptr,
    pages_width,
    absent_ptr,
    num_competing,
    num_layers,
    num_heads,
    forms_ptr,
    factor,
    weights_ptr,
    eps,
    taken_ptr,
    found_ptr,
    PAGE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    num_tiles = tl.cdiv(num_competing, TOKENS)
    owner, tile = (tl.program_id(0) // num_tiles).to(tl.int64), tl.program_id(0) % num_tiles
    layer = owner // num_heads % num_layers
    columns = tile * TOKENS + tl.arange(0, TOKENS)
    inside = columns < num_competing
    present = inside & (columns >= tl.load(absent_ptr + owner).to(tl.int32))
    channels = tl.arange(0, CHANNELS)
    is_channel = channels < HEAD_SIZE
    slots = places_of(pages_ptr, pages_width, owner, columns, present, PAGE)
    elements = slots * (2 * HEAD_SIZE) + HEAD_SIZE
    if codes_ptr is not None:
        codes_ptr += layer * CODES + 256
    mask = present[:, None] & is_channel[None, :]
    values = read(memory_ptr, elements[:, None] + channels[None, :], mask, codes_ptr)
    # As precise as the form: the bound counts on its rounding.
    values = values.to(forms_ptr.dtype.element_ty)
    forms_ptr += (layer * num_heads + owner % num_heads) * HEAD_SIZE * HEAD_SIZE
    squares = tl.zeros((TOKENS,), tl.float32)
    for start in range(0, HEAD_SIZE, COLUMNS):
        outputs = start + tl.arange(0, COLUMNS)
        is_output = outputs < HEAD_SIZE
        form = tl.load(
            forms_ptr + channels[:, None] * HEAD_SIZE + outputs[None, :],
            mask=is_channel[:, None] & is_output[None, :],
            other=0.0,
        )
        # The same values once more: registers cannot be cut into columns.
        of_outputs = present[:, None] & is_output[None, :]
        factors = read(memory_ptr, elements[:, None] + outputs[None, :], of_outputs, codes_ptr)
        squares += tl.sum(multiply(values, form) * factors.to(tl.float32), 1)
    found = factor * tl.sqrt(tl.maximum(squares, 0.0))
    places = owner * num_competing + columns
    found *= tl.load(weights_ptr + places, mask=inside, other=0.0) + eps
    found = tl.where(tl.load(taken_ptr + places, mask=inside, other=0) != 0, -1.0, found)
    tl.store(found_ptr + places, found, mask=inside)
