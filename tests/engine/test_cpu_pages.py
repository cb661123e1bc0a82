"""Pages of vLLM's CPU kernel: their inner order, and the kernel through the one-head view."""

import pytest
import torch
from vllm import _custom_ops as ops

from vllm_kvselect.engine.cpu import pages as cpu_pages
from vllm_kvselect.engine.cpu.pages import PageCodec, one_head_view, write_entries
from vllm_kvselect.paging.compaction import head_pages

# (instruction set, dtype, block size, head size) as vLLM pairs them.
KERNELS = [
    ("amx", torch.bfloat16, 32, 64),
    ("amx", torch.bfloat16, 128, 128),
    ("vec", torch.bfloat16, 32, 64),
    ("vec", torch.float16, 32, 128),
    ("vec", torch.float32, 64, 64),
    ("vec16", torch.bfloat16, 32, 80),
    ("vec16", torch.float32, 32, 112),
]
NUM_KV_HEADS, GROUP, NUM_BLOCKS = 3, 2, 12


@pytest.fixture(params=KERNELS, ids=lambda kernel: "-".join(map(str, kernel)))
def kernel(request: pytest.FixtureRequest) -> tuple[str, torch.dtype, int, int]:
    if request.param[0] == "amx" and not torch.cpu._init_amx():
        pytest.skip("this processor has no AMX tiles")
    return request.param


def stock_write(
    cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, isa: str
) -> None:
    """Writes `[num_tokens, num_kv_heads, head_size]` as vLLM's backend does."""
    num_blocks, num_kv_heads, block_size, _ = cache.shape
    pages = cache.view(num_blocks, num_kv_heads, 2 * block_size, -1)
    ops.cpu_attn_reshape_and_cache(key, value, *pages.chunk(2, dim=2), slots, isa)


def test_codec_reads_what_vllm_wrote(kernel: tuple[str, torch.dtype, int, int]) -> None:
    isa, dtype, block_size, head_size = kernel
    cache = torch.randn(NUM_BLOCKS, NUM_KV_HEADS, block_size, 2 * head_size).to(dtype)
    blocks = torch.tensor([7, 2, 11])
    key, value = torch.randn(2, 3 * block_size, NUM_KV_HEADS, head_size).to(dtype)
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
    stock_write(cache, key, value, slots, isa)
    codec = PageCodec(isa, dtype, block_size, head_size)
    pages = head_pages(blocks, NUM_KV_HEADS)
    assert torch.equal(codec.read_keys(cache, pages), key.transpose(0, 1))
    assert torch.equal(codec.read_values(cache, pages), value.transpose(0, 1))


def test_written_entries_are_read_back_from_any_page(
    kernel: tuple[str, torch.dtype, int, int],
) -> None:
    isa, dtype, block_size, head_size = kernel
    cache = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, block_size, 2 * head_size, dtype=dtype)
    slots = torch.randperm(NUM_BLOCKS * NUM_KV_HEADS * block_size)[:50]
    key, value = torch.randn(2, 50, head_size).to(dtype)
    write_entries(cache, key, value, slots, isa)
    codec = PageCodec(isa, dtype, block_size, head_size)
    every_page = head_pages(torch.arange(NUM_BLOCKS), NUM_KV_HEADS)
    for entries, read in ((key, codec.read_keys), (value, codec.read_values)):
        # [head, block * offset] -> the slot order of the one-head view: block, head, offset
        by_head = read(cache, every_page).view(NUM_KV_HEADS, NUM_BLOCKS, block_size, head_size)
        by_slot = by_head.transpose(0, 1).reshape(-1, head_size)
        assert torch.equal(by_slot[slots], entries)
        assert by_slot.count_nonzero() == entries.count_nonzero()


def test_entries_are_read_from_any_slot(kernel: tuple[str, torch.dtype, int, int]) -> None:
    isa, dtype, block_size, head_size = kernel
    cache = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, block_size, 2 * head_size, dtype=dtype)
    slots = torch.randperm(NUM_BLOCKS * NUM_KV_HEADS * block_size)
    key, value = torch.randn(2, len(slots), head_size).to(dtype)
    write_entries(cache, key, value, slots, isa)
    codec = PageCodec(isa, dtype, block_size, head_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_pages, "_ENTRIES_AT_ONCE", 100)
        read = codec.read_entries(cache, slots)
    assert torch.equal(read[0], key)
    assert torch.equal(read[1], value)


def test_pages_behind_two_to_the_31st_element() -> None:
    """The kernel counts pages of all layers: its offsets must not end at 32 bits."""
    isa, dtype, block_size, head_size = "vec", torch.float16, 32, 64
    num_pages = 2**31 // (2 * block_size * head_size) + 8
    # Reserved, not used: only the pages that are written take memory.
    cache = torch.empty(num_pages, 1, block_size, 2 * head_size, dtype=dtype)
    page = num_pages - 3
    key, value = torch.randn(2, block_size, head_size).to(dtype)
    slots = page * block_size + torch.arange(block_size)
    query, seq_lens = torch.randn(1, 2, head_size).to(dtype), torch.tensor([30], dtype=torch.int32)
    outputs = []
    for where, written, index in ((cache, slots, page), (cache[:1].clone(), slots % 32, 0)):
        write_entries(where, key, value, written, isa)
        table = torch.tensor([[index]], dtype=torch.int32)
        outputs.append(attend(query, one_head_view(where), table, seq_lens, isa))
    assert torch.equal(*outputs)
    codec = PageCodec(isa, dtype, block_size, head_size)
    assert torch.equal(codec.read_entries(cache, slots)[1], value)


def test_one_head_view_computes_what_the_stock_call_computes(
    kernel: tuple[str, torch.dtype, int, int],
) -> None:
    isa, dtype, block_size, head_size = kernel
    seq_lens = torch.tensor([3 * block_size - 5, block_size, 2 * block_size + 1], dtype=torch.int32)
    block_table = torch.randperm(NUM_BLOCKS)[:9].view(3, 3).to(torch.int32)
    cache = torch.empty(NUM_BLOCKS, NUM_KV_HEADS, block_size, 2 * head_size, dtype=dtype)
    key, value = torch.randn(2, NUM_BLOCKS * block_size, NUM_KV_HEADS, head_size).to(dtype)
    stock_write(cache, key, value, torch.arange(NUM_BLOCKS * block_size), isa)
    query = torch.randn(3, NUM_KV_HEADS * GROUP, head_size).to(dtype)
    stock = attend(
        query, cache.view(NUM_BLOCKS, NUM_KV_HEADS, 2 * block_size, -1), block_table, seq_lens, isa
    )

    heads = torch.arange(NUM_KV_HEADS, dtype=torch.int32)[:, None]
    pages = (block_table[:, None] * NUM_KV_HEADS + heads).flatten(0, 1)
    one_head = attend(
        query.view(3 * NUM_KV_HEADS, GROUP, head_size),
        one_head_view(cache),
        pages.contiguous(),
        seq_lens.repeat_interleave(NUM_KV_HEADS),
        isa,
    ).view_as(stock)
    if isa == "amx":
        # Other tiles, other order of bfloat16 roundings: two in the weights, one in the output.
        bound = 4 * 2.0**-8 * value.abs().max()
        assert (one_head - stock).abs().max() <= bound
    else:
        assert torch.equal(one_head, stock)


def attend(
    query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, seq_lens: torch.Tensor, isa: str
) -> torch.Tensor:
    """One decode step of vLLM's kernel over a cache of any number of KV heads."""
    output, num_kv_heads = torch.empty_like(query), cache.shape[1]
    start_loc = torch.arange(len(query) + 1, dtype=torch.int32)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        len(query),
        query.shape[1],
        num_kv_heads,
        query.shape[2],
        seq_lens,
        query.dtype,
        start_loc,
        True,
        -1,
        isa,
        True,
    )
    ops.cpu_attention_with_kv_cache(
        query,
        *cache.chunk(2, dim=2),
        output,
        start_loc,
        seq_lens,
        query.shape[2] ** -0.5,
        True,
        None,
        -1,
        table,
        0.0,
        metadata,
        None,
    )
    return output
