"""PageCodec: reads and moves entries of pages of vLLM's CPU kernel, whatever their inner order.

On CPU a page is all its keys, then all its values, each in an order that suits the kernel's
instruction set ("amx", "vec", "vec16") and the type of the cache. The order is learned by writing
coded values with vLLM's own cache-write op and reading them back. Entries are moved as bytes: what
is quantised is not quantised again.
"""

from typing import NamedTuple, Self

import torch
from vllm import _custom_ops as ops

from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.paging.compaction import packed_slots, parts, retained_slots

_ENTRIES_AT_ONCE = 2**15
"""Entries that are read at once: their indices take more memory than they do."""

_QUANTIZED = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""What the bytes of a quantised cache are, by `--kv-cache-dtype`."""


def one_head_view(kv_cache: torch.Tensor) -> torch.Tensor:
    """Views the cache of a layer as a paged cache with a single KV head.

    Args:
        kv_cache: `[num_blocks, num_kv_heads, page_size, 2 * head_size]`, layout LBHNC.

    Returns:
        `[num_blocks * num_kv_heads, 1, 2 * page_size, head_size]`, the same memory; the first half
        of dimension 2 is the page's keys, the second its values.
    """
    num_blocks, num_kv_heads, page_size, _ = kv_cache.shape
    return kv_cache.view(num_blocks * num_kv_heads, 1, 2 * page_size, -1)


def write_entries(
    kv_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    isa: str,
    cache_dtype: str = "auto",
) -> None:
    """Writes entries into slots of the one-head view as vLLM does, with scales of 1.

    Args:
        kv_cache: `[num_blocks, num_kv_heads, page_size, 2 * head_size]`, of a layer or of all.
        key: `[num_entries, head_size]`.
        value: `[num_entries, head_size]`.
        slots: `page * page_size + offset`, `[num_entries]` int64.
        isa: The kernel's instruction set, as the layer uses it.
        cache_dtype: The layer's `--kv-cache-dtype`.
    """
    entries, pages = (key.unsqueeze(1), value.unsqueeze(1)), one_head_view(kv_cache).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(*entries, *pages, slots, isa, kv_cache_dtype=cache_dtype)


class PageCodec:
    """The inner order of pages of one kernel, dtype and shape."""

    def __init__(
        self,
        isa: str,
        dtype: torch.dtype,
        page_size: int,
        head_size: int,
        kernels: Kernels = REFERENCES,
        cache_dtype: str = "auto",
    ) -> None:
        self.page_size, self.head_size = page_size, head_size
        self._dtype, self._kernels = dtype, kernels
        self._quantized = _QUANTIZED.get(cache_dtype)
        learned = _learn_places(isa, dtype, page_size, head_size, cache_dtype)
        itemsize = (self._quantized or dtype).itemsize
        self._keys, self._values = (_Places.of(places, itemsize) for places in learned)

    def numbers(self, scale: float) -> torch.Tensor | None:
        """What the bytes of a quantised cache stand for, with the layer's scale of keys or values.

        Returns:
            `[256]`, of the model's dtype; None if the cache is not quantised.
        """
        if self._quantized is None:
            return None
        codes = torch.arange(256, dtype=torch.uint8).view(self._quantized)
        return (codes.float() * scale).to(self._dtype)

    def read(
        self,
        kv_cache: torch.Tensor,
        pages: torch.Tensor,
        numbers: torch.Tensor | None = None,
        are_values: bool = False,
    ) -> torch.Tensor:
        """Reads the keys of whole pages, or their values, in token order.

        Args:
            kv_cache: A layer's cache, `[num_blocks, num_kv_heads, page_size, 2 * head_size]`.
            pages: Page ids of each head in token order, `[num_kv_heads, n]` int64.
            numbers: What its bytes stand for; None for its own dtype.
            are_values: Whether values are read.

        Returns:
            `[num_kv_heads, n * page_size, head_size]`.
        """
        places = self._values if are_values else self._keys
        read = self._kernels.read_pages(places.of_pages(kv_cache), pages.flatten(), places.indices)
        entries = read.view(kv_cache.dtype).view(pages.shape[0], -1, self.head_size)
        return entries if numbers is None else self._kernels.look_up(entries, numbers)

    def move_retained(
        self,
        memory: torch.Tensor,
        pages: torch.Tensor,
        retained: torch.Tensor,
        num_competing: int,
        packed_blocks: torch.Tensor,
    ) -> None:
        """`compaction.move_retained` in pages whose order is that of the kernel."""
        size = self.page_size
        sources = retained_slots(pages, retained, num_competing, size)
        targets = packed_slots(packed_blocks, memory.shape[1], size)
        at_once = [
            slice(start, start + _ENTRIES_AT_ONCE)
            for start in range(0, len(sources), _ENTRIES_AT_ONCE)
        ]
        for places in (self._keys, self._values):
            elements, of_entries = places.of_pages(memory), places.indices.view(size, -1)
            for part in parts(of_entries.shape[1], elements.itemsize, len(sources)):
                chosen = of_entries[:, part].flatten()
                read = [
                    self._kernels.read_entries(elements, sources[some], chosen, size)
                    for some in at_once
                ]
                for some, entries in zip(at_once, read, strict=True):
                    self._kernels.write_entries(elements, targets[some], chosen, size, entries)


class _Places(NamedTuple):
    """Where the elements of a page are, in order, some of them as one.

    Attributes:
        indices: `[m]` int32.
        dtype: An integer as wide as the elements that are read as one.
    """

    indices: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, indices: torch.Tensor, size: int) -> Self:
        """Joins neighbours that stay neighbours, up to 8 bytes: fewer and wider reads.

        Args:
            indices: `[m]` int32.
            size: Bytes of an element.
        """
        while size < 8:
            first, second = indices[::2], indices[1::2]
            if not ((first % 2 == 0) & (second == first + 1)).all():
                break
            indices, size = first // 2, 2 * size
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return cls(indices.contiguous(), integers[size])

    def of_pages(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The elements of every page of a cache, `[num_pages, num_elements]`."""
        return one_head_view(kv_cache).flatten(1).view(self.dtype)


def _learn_places(
    isa: str, dtype: torch.dtype, page_size: int, head_size: int, cache_dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index in a flat page of every element of its keys and of its values.

    Returns:
        Two `[page_size * head_size]` int32, in token order.
    """
    num_elements = page_size * head_size
    codes = torch.arange(num_elements)
    found = torch.zeros(2 * num_elements, dtype=torch.int64)
    # Codes go in by digits: every integer up to 256 is exact in bfloat16, up to 8 in either fp8.
    quantized = _QUANTIZED.get(cache_dtype)
    num_bits = 8 if quantized is None else 3
    for shift in range(0, (2 * num_elements).bit_length(), num_bits):
        stored = dtype if quantized is None else torch.uint8
        page = torch.zeros(1, 1, page_size, 2 * head_size, dtype=stored)
        key, value = (
            ((part >> shift) % 2**num_bits).to(dtype).view(page_size, head_size)
            for part in (codes, codes + num_elements)
        )
        write_entries(page, key, value, torch.arange(page_size), isa, cache_dtype)
        found += page.flatten().view(quantized or dtype).to(torch.int64) << shift
    key, value = torch.argsort(found).to(torch.int32).view(2, num_elements)
    return key, value
