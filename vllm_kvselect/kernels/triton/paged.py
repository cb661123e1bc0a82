"""Entries where they lie: kernels over rows read keys and values through the ids of their pages.

A head of a row is an *owner*, `row * num_kv_heads + head`. Programs are numbered tile by tile of an
owner, owner after owner, in one axis, whose length has no limit.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_kvselect.scoring.held import Held

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of keys and values, as they are scored."""

CODES = tl.constexpr(512)
"""Numbers of a layer in the table of what bytes stand for: 256 of keys, then as many of values."""

UNSPECIALISED = ["pages_width", "num_competing", "num_columns", "num_layers", "num_heads"]
"""Arguments for whose values nothing is compiled anew."""


def takes(held: Held) -> bool:
    """Whether kernels read what is held."""
    return held.make_paged is not None and held.paged.dtype in DTYPES


def paged(held: Held) -> dict[str, Any]:
    """What kernels are told of the entries."""
    memory, codes = held.paged.memory, held.paged.codes
    return {
        "memory_ptr": memory,
        "codes_ptr": codes,
        "pages_ptr": held.pages,
        "pages_width": held.pages.shape[2],
        "absent_ptr": held.num_absent,
        "num_competing": held.num_competing,
        "num_layers": held.num_layers,
        "num_heads": held.num_kv_heads,
        "PAGE": memory.shape[1],
        "HEAD_SIZE": memory.shape[2] // 2,
    }


def empty(held: Held, num_columns: int | None = None) -> torch.Tensor:
    """Room for a number for each column of each head, float32."""
    columns = held.num_competing if num_columns is None else num_columns
    shape = held.num_rows, held.num_kv_heads, columns
    return torch.empty(shape, dtype=torch.float32, device=held.pages.device)


@triton.jit
def places_of(pages_ptr, pages_width, owner, columns, inside, PAGE: tl.constexpr):
    """Slots of some columns of an owner in the memory, `[n]` int64."""
    pages_ptr += owner * pages_width
    page = tl.load(pages_ptr + columns // PAGE, mask=inside, other=0).to(tl.int64)
    return page * PAGE + columns % PAGE


@triton.jit
def read(memory_ptr, places, mask, codes_ptr):
    """Elements of entries, as the numbers that they are scored as; 0 where masked."""
    elements = tl.load(memory_ptr + places, mask=mask, other=0)
    if codes_ptr is not None:
        elements = tl.load(codes_ptr + elements.to(tl.int32))
    return elements
