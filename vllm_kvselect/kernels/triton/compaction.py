"""Compaction as a move of bytes, whatever they mean; `vllm_kvselect/paging/compaction.py`.

Sources and targets overlap, so entries are gathered into a buffer before any is written.
"""

import torch
import triton
import triton.language as tl

from vllm_kvselect.kernels.triton.selection import rows

_ENTRIES = 32
"""Entries that a program moves at once."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def gather_entries(
    entries: torch.Tensor, retained: torch.Tensor, num_competing: int
) -> torch.Tensor:
    """Twin of `compaction.gather_entries`."""
    return _gather(rows(entries).unsqueeze(0), None, retained, num_competing)


def gather_from_blocks(
    cache: torch.Tensor, blocks: torch.Tensor, retained: torch.Tensor, num_competing: int
) -> torch.Tensor:
    """Twin of `compaction.gather_from_blocks`."""
    return _gather(cache, blocks, retained, num_competing)


def scatter_entries(cache: torch.Tensor, slots: torch.Tensor, entries: torch.Tensor) -> None:
    """Twin of `compaction.scatter_entries`."""
    _, num_kv_heads, block_size, width = cache.shape
    if not (num_entries := slots.numel()):
        return
    _scatter_kernel[(triton.cdiv(num_entries, _ENTRIES),)](
        _integers(cache),
        *cache.stride()[:3],
        num_kv_heads,
        block_size,
        slots,
        _integers(entries.contiguous()),
        num_entries,
        width,
        ENTRIES=_ENTRIES,
        WIDTH=triton.next_power_of_2(width),
    )


def _gather(
    source: torch.Tensor, blocks: torch.Tensor | None, retained: torch.Tensor, num_competing: int
) -> torch.Tensor:
    """Rows of `[num_blocks, num_kv_heads, block_size, width]`; without blocks, of the only one."""
    num_entries, (block_size, width) = retained.numel(), source.shape[2:]
    gathered = torch.empty(num_entries, width, dtype=source.dtype, device=source.device)
    if num_entries:
        _gather_kernel[(triton.cdiv(num_entries, _ENTRIES),)](
            _integers(source),
            *source.stride()[:3],
            blocks,
            block_size,
            retained,
            num_entries,
            num_competing,
            _integers(gathered),
            width,
            PAGED=blocks is not None,
            ENTRIES=_ENTRIES,
            WIDTH=triton.next_power_of_2(width),
        )
    return gathered


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()])


@triton.jit(do_not_specialize=["num_entries", "num_competing"])
def _gather_kernel(
    source_ptr,
    block_stride,
    head_stride,
    token_stride,
    blocks_ptr,
    block_size,
    retained_ptr,
    num_entries,
    num_competing,
    gathered_ptr,
    width,
    PAGED: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    entries, elements = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES), tl.arange(0, WIDTH)
    inside = entries < num_entries
    retained = tl.load(retained_ptr + entries, mask=inside, other=0)
    head, token = retained // num_competing, retained % num_competing
    places = head * head_stride
    if PAGED:
        block = tl.load(blocks_ptr + token // block_size, mask=inside, other=0).to(tl.int64)
        places += block * block_stride + token % block_size * token_stride
    else:
        places += token * token_stride
    mask = inside[:, None] & (elements < width)[None, :]
    moved = tl.load(source_ptr + places[:, None] + elements[None, :], mask=mask, other=0)
    places = entries[:, None].to(tl.int64) * width + elements[None, :]
    tl.store(gathered_ptr + places, moved, mask=mask)


@triton.jit(do_not_specialize=["num_entries"])
def _scatter_kernel(
    cache_ptr,
    block_stride,
    head_stride,
    token_stride,
    num_kv_heads,
    block_size,
    slots_ptr,
    entries_ptr,
    num_entries,
    width,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    entries, elements = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES), tl.arange(0, WIDTH)
    inside = entries < num_entries
    slots = tl.load(slots_ptr + entries, mask=inside, other=0)
    page = slots // block_size
    targets = page // num_kv_heads * block_stride + page % num_kv_heads * head_stride
    targets += slots % block_size * token_stride
    mask = inside[:, None] & (elements < width)[None, :]
    places = entries[:, None].to(tl.int64) * width + elements[None, :]
    moved = tl.load(entries_ptr + places, mask=mask, other=0)
    tl.store(cache_ptr + targets[:, None] + elements[None, :], moved, mask=mask)
