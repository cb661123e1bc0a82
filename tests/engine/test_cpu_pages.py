"""Pages of vLLM's CPU kernel: their inner order, and the kernel through the one-head view."""

from typing import Any, NamedTuple

import pytest
import torch
from vllm import _custom_ops as ops

from tests.engine.conftest import needs_fp8_caches
from vllm_kvselect.engine.cpu import pages as cpu_pages
from vllm_kvselect.engine.cpu.pages import PageCodec, one_head_view, write_entries
from vllm_kvselect.engine.platforms import has_fp8_caches
from vllm_kvselect.paging import compaction
from vllm_kvselect.paging.compaction import head_pages, packed_slots, retained_slots


class Kernel(NamedTuple):
    """A kernel as vLLM pairs instruction sets, types and sizes."""

    isa: str
    dtype: torch.dtype
    block_size: int
    head_size: int
    cache_dtype: str = "auto"
    scales: tuple[float, float] = (1.0, 1.0)

    def __str__(self) -> str:
        return "-".join(map(str, self[:5]))

    @property
    def codec(self) -> PageCodec:
        return PageCodec(*self[:4], cache_dtype=self.cache_dtype)

    @property
    def stored(self) -> dict[str, Any]:
        """What vLLM's operators are told of the cache's type."""
        key_scale, value_scale = self.scales
        return {"kv_cache_dtype": self.cache_dtype, "k_scale": key_scale, "v_scale": value_scale}

    def cache(self, num_heads: int = 3) -> torch.Tensor:
        """A cache that holds anything."""
        dtype = self.dtype if self.cache_dtype == "auto" else torch.uint8
        shape = NUM_BLOCKS, num_heads, self.block_size, 2 * self.head_size
        return (100 * torch.rand(shape)).to(dtype)

    def entries(self, *shape: int) -> torch.Tensor:
        """Keys and values, of which a quantised cache loses nothing, `[2, *shape, head_size]`."""
        drawn = torch.randn(2, *shape, self.head_size)
        if self.cache_dtype != "auto":
            scales = torch.tensor(self.scales).view(2, *[1] * (drawn.dim() - 1))
            drawn = drawn.to(FP8[self.cache_dtype]).float() * scales
        return drawn.to(self.dtype)


FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
KERNELS = [
    Kernel("amx", torch.bfloat16, 32, 64),
    Kernel("amx", torch.bfloat16, 128, 128),
    Kernel("amx", torch.bfloat16, 32, 64, "fp8", (0.5, 0.25)),
    Kernel("vec", torch.bfloat16, 32, 64),
    Kernel("vec", torch.float16, 32, 128),
    Kernel("vec", torch.float32, 64, 64),
    Kernel("vec", torch.bfloat16, 32, 64, "fp8", (0.5, 0.25)),
    Kernel("vec", torch.float32, 32, 128, "fp8"),
    Kernel("vec", torch.float16, 64, 32, "fp8_e5m2", (1.0, 2.0)),
    Kernel("vec16", torch.bfloat16, 32, 80),
    Kernel("vec16", torch.float32, 32, 112),
]
NUM_KV_HEADS, GROUP, NUM_BLOCKS = 3, 2, 12


@pytest.fixture(params=KERNELS, ids=str)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    kernel: Kernel = request.param
    if kernel.isa == "amx" and not torch.cpu._init_amx():
        pytest.skip("this processor has no AMX tiles")
    if kernel.cache_dtype != "auto" and not has_fp8_caches():
        pytest.skip(needs_fp8_caches.kwargs["reason"])
    return kernel


def stock_write(
    kernel: Kernel, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes `[num_tokens, num_kv_heads, head_size]` as vLLM's backend does."""
    num_blocks, num_kv_heads, block_size, _ = cache.shape
    pages = cache.view(num_blocks, num_kv_heads, 2 * block_size, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, *pages, slots, kernel.isa, **kernel.stored)


def numbers(kernel: Kernel, codec: PageCodec) -> list[torch.Tensor | None]:
    return [codec.numbers(scale) for scale in kernel.scales]


def test_codec_reads_what_vllm_wrote(kernel: Kernel) -> None:
    cache, blocks, size = kernel.cache(), torch.tensor([7, 2, 11]), kernel.block_size
    key, value = kernel.entries(3 * size, NUM_KV_HEADS)
    slots = (blocks[:, None] * size + torch.arange(size)).flatten()
    stock_write(kernel, cache, key, value, slots)
    codec, pages = kernel.codec, head_pages(blocks, NUM_KV_HEADS)
    keys, values = numbers(kernel, codec)
    assert torch.equal(codec.read(cache, pages, keys), key.transpose(0, 1))
    assert torch.equal(codec.read(cache, pages, values, True), value.transpose(0, 1))


def test_written_entries_are_read_back_from_any_page(kernel: Kernel) -> None:
    isa, _, block_size, head_size = kernel[:4]
    kernel = kernel._replace(scales=(1.0, 1.0))
    cache = kernel.cache().zero_()
    slots = torch.randperm(NUM_BLOCKS * NUM_KV_HEADS * block_size)[:50]
    key, value = kernel.entries(50)
    write_entries(cache, key, value, slots, isa, kernel.cache_dtype)
    codec = kernel.codec
    every_page = head_pages(torch.arange(NUM_BLOCKS), NUM_KV_HEADS)
    for entries, are_values in ((key, False), (value, True)):
        # [head, block * offset] -> the slot order of the one-head view: block, head, offset
        read_back = codec.read(cache, every_page, codec.numbers(1.0), are_values)
        by_head = read_back.view(NUM_KV_HEADS, NUM_BLOCKS, block_size, head_size)
        by_slot = by_head.transpose(0, 1).reshape(-1, head_size)
        assert torch.equal(by_slot[slots], entries)
        assert by_slot.count_nonzero() == entries.count_nonzero()


def test_moved_entries_are_bit_by_bit_those_written_anew(kernel: Kernel) -> None:
    """Also where sources and targets overlap, and of numbers that a quantised cache rounds."""
    num_pages, num_heads, size = NUM_BLOCKS * NUM_KV_HEADS, NUM_KV_HEADS, kernel.block_size
    num_slots = num_pages * size
    key, value = torch.randn(2, num_slots, 1, kernel.head_size).to(kernel.dtype)
    moved = kernel.cache()
    view = moved.view(-1, 1, size, 2 * kernel.head_size)
    every_slot, packed_blocks = torch.arange(num_slots), torch.randperm(NUM_BLOCKS)[:4]
    stock_write(kernel, view, key, value, every_slot)
    pages, num_competing = torch.randperm(num_pages).view(num_heads, -1), NUM_BLOCKS * size
    retained = torch.randperm(num_slots)[: 4 * num_heads * size].sort().values
    at, expected = every_slot.clone(), view.clone()
    at[packed_slots(packed_blocks, num_heads, size)] = retained_slots(
        pages, retained, num_competing, size
    )
    stock_write(kernel, expected, key[at], value[at], every_slot)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_pages, "_ENTRIES_AT_ONCE", 100)
        patch.setattr(compaction, "MOST_BYTES", 48 * len(retained))
        kernel.codec.move_retained(moved, pages, retained, num_competing, packed_blocks)
    assert torch.equal(view, expected)


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
    assert torch.equal(codec.read(cache, torch.tensor([[page]]), None, True)[0], value)
    retained, packed = torch.arange(block_size), torch.tensor([page - 2])
    codec.move_retained(cache, torch.tensor([[page]]), retained, block_size, packed)
    assert torch.equal(codec.read(cache, torch.tensor([[page - 2]]), None, True)[0], value)


def test_one_head_view_computes_what_the_stock_call_computes(kernel: Kernel) -> None:
    isa, dtype, block_size, head_size = kernel[:4]
    seq_lens = torch.tensor([3 * block_size - 5, block_size, 2 * block_size + 1], dtype=torch.int32)
    block_table = torch.randperm(NUM_BLOCKS)[:9].view(3, 3).to(torch.int32)
    cache = kernel.cache()
    key, value = torch.randn(2, NUM_BLOCKS * block_size, NUM_KV_HEADS, head_size).to(dtype)
    stock_write(kernel, cache, key, value, torch.arange(NUM_BLOCKS * block_size))
    query = torch.randn(3, NUM_KV_HEADS * GROUP, head_size).to(dtype)
    pages = cache.view(NUM_BLOCKS, NUM_KV_HEADS, 2 * block_size, -1)
    stock = attend(query, pages, block_table, seq_lens, isa, **kernel.stored)

    heads = torch.arange(NUM_KV_HEADS, dtype=torch.int32)[:, None]
    pages = (block_table[:, None] * NUM_KV_HEADS + heads).flatten(0, 1)
    one_head = attend(
        query.view(3 * NUM_KV_HEADS, GROUP, head_size),
        one_head_view(cache),
        pages.contiguous(),
        seq_lens.repeat_interleave(NUM_KV_HEADS),
        isa,
        **kernel.stored,
    ).view_as(stock)
    if isa == "amx":
        # Other tiles, other order of bfloat16 roundings: two in the weights, one in the output.
        bound = 4 * 2.0**-8 * value.abs().max()
        assert (one_head - stock).abs().max() <= bound
    else:
        assert torch.equal(one_head, stock)


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    isa: str,
    kv_cache_dtype: str = "auto",
    **scales: float,
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
        kv_cache_dtype=kv_cache_dtype,
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
        kv_cache_dtype=kv_cache_dtype,
        **scales,
    )
    return output
