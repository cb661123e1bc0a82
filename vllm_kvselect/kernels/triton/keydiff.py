"""Keys that are unlike the others, of all rows; `vllm_kvselect/scoring/keydiff.py`.

Keys are read twice: for the sum of their directions, then for the cosines.
"""

import torch
import triton
import triton.language as tl

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels.triton.paged import CODES, UNSPECIALISED, empty, paged, places_of, read
from vllm_kvselect.kernels.triton.products import padded
from vllm_kvselect.scoring.held import Held

_TOKENS = 64
"""Columns that a program holds at once: 64 channels a thread at a head size of 128."""

_PART = 1024
"""Columns whose directions a program adds up."""


def keydiff_scores(held: Held, config: EvictionConfig) -> torch.Tensor:
    """Twin of `scoring.keydiff.keydiff_scores`, over rows."""
    channels = padded(held.paged.memory.shape[2] // 2)
    num_owners = held.num_rows * held.num_kv_heads
    num_parts = triton.cdiv(held.num_competing + max(held.behind), _PART)
    anchors = torch.empty(
        num_owners, num_parts, channels, dtype=torch.float32, device=held.pages.device
    )
    scores = empty(held)
    given = {
        **paged(held),
        "anchors_ptr": anchors,
        "num_parts": num_parts,
        "TOKENS": _TOKENS,
        "CHANNELS": channels,
    }
    _anchors_kernel[(num_owners * num_parts,)](**given, behind_ptr=held.on_device, PART=_PART)
    _cosines_kernel[(num_owners * triton.cdiv(held.num_competing, _TOKENS),)](
        **given, scores_ptr=scores
    )
    return scores


@triton.jit(do_not_specialize=[*UNSPECIALISED, "num_parts"])
def _anchors_kernel(
    memory_ptr,
    codes_ptr,
    pages_ptr,
    pages_width,
    absent_ptr,
    num_competing,
    num_layers,
    num_heads,
    behind_ptr,
    anchors_ptr,
    num_parts,
    PAGE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PART: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Adds up the directions of a part of an owner's keys."""
    owner, part = (tl.program_id(0) // num_parts).to(tl.int64), tl.program_id(0) % num_parts
    row = owner // num_heads
    if codes_ptr is not None:
        codes_ptr += row % num_layers * CODES
    num_columns = num_competing + tl.load(behind_ptr + row // num_layers)
    num_absent = tl.load(absent_ptr + owner).to(tl.int32)
    channels = tl.arange(0, CHANNELS)
    anchor = tl.zeros((CHANNELS,), tl.float32)
    for start in range(part * PART, tl.minimum((part + 1) * PART, num_columns), TOKENS):
        columns = start + tl.arange(0, TOKENS)
        inside = (columns < num_columns) & (columns >= num_absent)
        places = places_of(pages_ptr, pages_width, owner, columns, inside, PAGE) * (2 * HEAD_SIZE)
        mask = inside[:, None] & (channels < HEAD_SIZE)[None, :]
        keys = read(memory_ptr, places[:, None] + channels[None, :], mask, codes_ptr)
        keys = keys.to(tl.float32)
        lengths = tl.maximum(tl.sqrt(tl.sum(keys * keys, 1)), 1e-12)
        anchor += tl.sum(keys / lengths[:, None], 0)
    tl.store(anchors_ptr + (owner * num_parts + part) * CHANNELS + channels, anchor)


@triton.jit(do_not_specialize=[*UNSPECIALISED, "num_parts"])
def _cosines_kernel(
    memory_ptr,
    codes_ptr,
    pages_ptr,
    pages_width,
    absent_ptr,
    num_competing,
    num_layers,
    num_heads,
    anchors_ptr,
    num_parts,
    scores_ptr,
    PAGE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """One minus the cosine of each key to the sum."""
    num_tiles = tl.cdiv(num_competing, TOKENS)
    owner, tile = (tl.program_id(0) // num_tiles).to(tl.int64), tl.program_id(0) % num_tiles
    if codes_ptr is not None:
        codes_ptr += owner // num_heads % num_layers * CODES
    channels = tl.arange(0, CHANNELS)
    anchor = tl.zeros((CHANNELS,), tl.float32)
    for part in range(num_parts):
        anchor += tl.load(anchors_ptr + (owner * num_parts + part) * CHANNELS + channels)
    anchor /= tl.maximum(tl.sqrt(tl.sum(anchor * anchor, 0)), 1e-12)
    columns = tile * TOKENS + tl.arange(0, TOKENS)
    inside = (columns < num_competing) & (columns >= tl.load(absent_ptr + owner).to(tl.int32))
    places = places_of(pages_ptr, pages_width, owner, columns, inside, PAGE) * (2 * HEAD_SIZE)
    mask = inside[:, None] & (channels < HEAD_SIZE)[None, :]
    keys = read(memory_ptr, places[:, None] + channels[None, :], mask, codes_ptr).to(tl.float32)
    lengths = tl.maximum(tl.sqrt(tl.sum(keys * keys, 1)), 1e-12)
    cosines = tl.sum(keys * anchor[None, :], 1) / lengths
    scores = tl.where(inside, tl.maximum(1 - cosines, 0.0), 0.0)
    tl.store(scores_ptr + owner * num_competing + columns, scores, mask=columns < num_competing)
