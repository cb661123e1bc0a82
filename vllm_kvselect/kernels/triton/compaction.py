"""Compaction as a move of bytes, whatever they mean; `vllm_kvselect/paging/compaction.py`.

Sources and targets overlap, so entries are gathered into a buffer before any is written.
"""

import torch
import triton
import triton.language as tl

from vllm_kvselect.kernels.triton.selection import rows
from vllm_kvselect.paging import compaction

_ENTRIES = 64
"""Entries that a program moves, in steps of a few elements."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def move_retained(
    memory: torch.Tensor,
    pages: torch.Tensor,
    retained: torch.Tensor,
    num_competing: int,
    packed_blocks: torch.Tensor,
) -> None:
    """Twin of `compaction.move_retained`."""
    if not (num_entries := retained.numel()):
        return
    pages, integers = rows(pages), memory.view(_INTEGERS[memory.itemsize])
    _, num_kv_heads, block_size, width = memory.shape
    in_parts = compaction.parts(width, memory.itemsize, num_entries)
    buffer = integers.new_empty(num_entries * (in_parts[0].stop - in_parts[0].start))
    # Units of 16 bytes, and steps of 4 of them: what Triton knows of their places makes wide loads.
    unit = max(1, 16 // memory.itemsize)
    grid = (triton.cdiv(num_entries, _ENTRIES),)
    for part in in_parts:
        moved = (num_entries, width, part.start // unit, part.stop - part.start)
        sizes = {"UNIT": unit, "STEP": 4 * unit, "ENTRIES": _ENTRIES}
        _gather_kernel[grid](
            integers.view(-1),
            pages,
            pages.stride(0),
            retained,
            num_competing,
            block_size,
            buffer,
            *moved,
            **sizes,
        )
        _scatter_kernel[grid](
            integers.view(-1), packed_blocks, num_kv_heads * block_size, buffer, *moved, **sizes
        )


@triton.jit(
    do_not_specialize=[
        "pages_stride",
        "num_competing",
        "num_entries",
        "first_unit",
        "num_elements",
    ],
    do_not_specialize_on_alignment=["pages_ptr", "retained_ptr"],
)
def _gather_kernel(
    memory_ptr,
    pages_ptr,
    pages_stride,
    retained_ptr,
    num_competing,
    block_size,
    buffer_ptr,
    num_entries,
    width,
    first_unit,
    num_elements,
    UNIT: tl.constexpr,
    STEP: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    entries = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entries < num_entries
    retained = tl.load(retained_ptr + entries, mask=inside, other=0)
    head, column = retained // num_competing, retained % num_competing
    pages = pages_ptr + head * pages_stride + column // block_size
    slots = tl.load(pages, mask=inside, other=0).to(tl.int64) * block_size + column % block_size
    memory_ptr += first_unit * UNIT
    for first in range(0, num_elements, STEP):
        elements = first + tl.arange(0, STEP)
        mask = inside[:, None] & (elements < num_elements)[None, :]
        moved = tl.load(memory_ptr + slots[:, None] * width + elements[None, :], mask=mask, other=0)
        places = entries[:, None].to(tl.int64) * num_elements + elements[None, :]
        tl.store(buffer_ptr + places, moved, mask=mask)


@triton.jit(
    do_not_specialize=["num_entries", "first_unit", "num_elements"],
    do_not_specialize_on_alignment=["blocks_ptr"],
)
def _scatter_kernel(
    memory_ptr,
    blocks_ptr,
    entries_of_block,
    buffer_ptr,
    num_entries,
    width,
    first_unit,
    num_elements,
    UNIT: tl.constexpr,
    STEP: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    entries = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entries < num_entries
    blocks = tl.load(blocks_ptr + entries // entries_of_block, mask=inside, other=0)
    slots = blocks.to(tl.int64) * entries_of_block + entries % entries_of_block
    memory_ptr += first_unit * UNIT
    for first in range(0, num_elements, STEP):
        elements = first + tl.arange(0, STEP)
        mask = inside[:, None] & (elements < num_elements)[None, :]
        places = entries[:, None].to(tl.int64) * num_elements + elements[None, :]
        moved = tl.load(buffer_ptr + places, mask=mask, other=0)
        tl.store(memory_ptr + slots[:, None] * width + elements[None, :], moved, mask=mask)
