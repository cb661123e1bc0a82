"""Head-wise page tables in buffers that outlive a graph; `vllm_kvselect/paging/page_table.py`.

One program a row writes the pages that its sequence has: the buffers' width costs nothing.
"""

import torch
import triton
import triton.language as tl

from vllm_kvselect.kernels.triton.selection import rows
from vllm_kvselect.paging.page_table import PageTable

_BLOCK = 256
"""Pages that a program writes at once."""


def headwise_page_table(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    first_packed: torch.Tensor,
    tail_start: torch.Tensor,
    offsets: torch.Tensor,
    block_size: int,
    num_blocks: int,
    first_layer: int = 0,
    out: PageTable | None = None,
    order: torch.Tensor | None = None,
    per_block: int = 1,
) -> PageTable:
    """Twin of `page_table.headwise_page_table` for given buffers, whose width is known."""
    assert out is not None
    block_table, offsets, pages = rows(block_table), rows(offsets), out.pages
    num_layers, num_reqs, num_offsets = offsets.shape
    num_kv_heads = num_offsets - 1
    _pages_kernel[(num_kv_heads, num_reqs, num_layers)](
        block_table,
        block_table.stride(0),
        seq_lens,
        first_packed,
        tail_start,
        offsets,
        *offsets.stride()[:2],
        block_size,
        per_block,
        num_blocks * num_kv_heads,
        first_layer,
        pages,
        *pages.stride()[:2],
        out.seq_lens,
        out.seq_lens.stride(0),
        order,
        0 if order is None else order.stride(0),
        BLOCK=_BLOCK,
    )
    return out


@triton.jit(
    do_not_specialize=[
        "block_table_stride",
        "offsets_layer_stride",
        "offsets_req_stride",
        "first_layer",
        "pages_layer_stride",
        "lengths_layer_stride",
        "order_layer_stride",
    ],
    # Of the layers from some one on.
    do_not_specialize_on_alignment=["offsets_ptr", "lengths_ptr", "order_ptr"],
)
def _pages_kernel(
    block_table_ptr,
    block_table_stride,
    seq_lens_ptr,
    first_packed_ptr,
    tail_start_ptr,
    offsets_ptr,
    offsets_layer_stride,
    offsets_req_stride,
    block_size,
    per_block,
    layer_pages,
    first_layer,
    pages_ptr,
    pages_layer_stride,
    pages_row_stride,
    lengths_ptr,
    lengths_layer_stride,
    order_ptr,
    order_layer_stride,
    BLOCK: tl.constexpr,
):
    head, req, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_kv_heads, row = tl.num_programs(0), req * tl.num_programs(0) + head
    if order_ptr is not None:
        sequence = tl.load(order_ptr + layer * order_layer_stride + row).to(tl.int32)
        req = sequence // num_kv_heads
        head = sequence - req * num_kv_heads
    block_table_ptr += req.to(tl.int64) * block_table_stride
    offsets_ptr += layer * offsets_layer_stride + req * offsets_req_stride + head
    start, end = tl.load(offsets_ptr).to(tl.int32), tl.load(offsets_ptr + 1).to(tl.int32)
    num_run_pages = end - start
    first_packed = tl.load(first_packed_ptr + req).to(tl.int32)
    tail_start = tl.load(tail_start_ptr + req).to(tl.int32)
    tail_len = tl.load(seq_lens_ptr + req).to(tl.int32) - tail_start * block_size
    packed_end = tail_start - tail_start % per_block
    num_packed = tl.maximum(packed_end - first_packed, 1)
    length = num_run_pages * block_size + tail_len
    tl.store(lengths_ptr + layer * lengths_layer_stride + row, length)
    num_pages = tl.cdiv(length, block_size)
    pages_ptr += layer * pages_layer_stride + row.to(tl.int64) * pages_row_stride
    for first in range(0, num_pages, BLOCK):
        column = first + tl.arange(0, BLOCK)
        run_page = start + column
        in_run, used = column < num_run_pages, column < num_pages
        run_block = run_page // num_kv_heads  # counted through the layers
        run_layer = run_block // num_packed
        in_packed = run_block - run_layer * num_packed + first_packed
        index = tl.where(in_run, in_packed, tail_start - num_run_pages + column)
        block = tl.load(block_table_ptr + index, mask=used, other=0).to(tl.int32)
        in_layer = tl.where(in_run, run_page - run_block * num_kv_heads, head)
        of_layer = tl.where(in_run, run_layer, first_layer + tl.program_id(2)) * layer_pages
        slot = of_layer + in_layer
        tl.store(pages_ptr + column, block * num_kv_heads + slot, mask=used)
