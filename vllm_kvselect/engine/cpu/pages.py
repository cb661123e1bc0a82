"""PageCodec: reads keys and values out of pages of vLLM's CPU kernel, whatever their inner order.

On CPU a page is all its keys, then all its values, each in an order that suits the kernel's
instruction set ("amx", "vec", "vec16"). The order is learned by writing coded values with vLLM's
own cache-write op and reading them back. Writing needs no codec: the op takes entries in token
order.
"""

from typing import NamedTuple, Self

import torch
from vllm import _custom_ops as ops

from vllm_kvselect.kernels.base import REFERENCES, Kernels

_ENTRIES_AT_ONCE = 2**15
"""Entries that are read at once: their indices take more memory than they do."""


def one_head_view(kv_cache: torch.Tensor) -> torch.Tensor:
    """Views the cache of a layer as a paged cache with a single KV head.

    Args:
        kv_cache: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, layout LBHNC.

    Returns:
        `[num_blocks * num_kv_heads, 1, 2 * block_size, head_size]`, the same memory; the first half
        of dimension 2 is the page's keys, the second its values.
    """
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    return kv_cache.view(num_blocks * num_kv_heads, 1, 2 * block_size, -1)


def write_entries(
    kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, isa: str
) -> None:
    """Writes entries into slots of the one-head view, in the kernel's own order.

    Args:
        kv_cache: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, of a layer or of all.
        key: `[num_entries, head_size]`.
        value: `[num_entries, head_size]`.
        slots: `page * block_size + offset`, `[num_entries]` int64.
        isa: The kernel's instruction set, as the layer uses it.
    """
    key_pages, value_pages = one_head_view(kv_cache).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        key.unsqueeze(1), value.unsqueeze(1), key_pages, value_pages, slots, isa
    )


class PageCodec:
    """The inner order of pages of one kernel, dtype and shape.

    Args:
        isa: The kernel's instruction set.
        dtype: Data type of the cache.
        block_size: Entries per page.
        head_size: Elements per key and per value.
        kernels: What computes the parts of a choice.
    """

    def __init__(
        self,
        isa: str,
        dtype: torch.dtype,
        block_size: int,
        head_size: int,
        kernels: Kernels = REFERENCES,
    ) -> None:
        self.block_size, self.head_size = block_size, head_size
        learned = _learn_places(isa, dtype, block_size, head_size)
        self._keys, self._values = (_Places.of(places, dtype) for places in learned)
        self._read_pages = kernels.read_pages
        self._read_entries = kernels.read_entries

    def read_keys(self, kv_cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Reads the keys of whole pages in token order.

        Args:
            kv_cache: A layer's cache, `[num_blocks, num_kv_heads, block_size, 2 * head_size]`.
            pages: Page ids of each head in token order, `[num_kv_heads, n]` int64.

        Returns:
            `[num_kv_heads, n * block_size, head_size]`.
        """
        return self._read(kv_cache, pages, self._keys)

    def read_values(self, kv_cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Reads the values of whole pages in token order; as `read_keys`."""
        return self._read(kv_cache, pages, self._values)

    def read_entries(
        self, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads the entries in some slots of the one-head view: what `write_entries` wrote there.

        Args:
            kv_cache: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, of a layer or of all.
            slots: `page * block_size + offset`, `[n]` int64.

        Returns:
            Keys and values, `[n, head_size]` each.
        """
        key, value = kv_cache.new_empty(2, len(slots), self.head_size)
        for start in range(0, len(slots), _ENTRIES_AT_ONCE):
            part = slice(start, start + _ENTRIES_AT_ONCE)
            for entries, places in ((key, self._keys), (value, self._values)):
                elements = one_head_view(kv_cache).flatten(1).view(places.dtype)
                read = self._read_entries(elements, slots[part], places.indices, self.block_size)
                entries[part] = read.view(kv_cache.dtype)
        return key, value

    def _read(self, kv_cache: torch.Tensor, pages: torch.Tensor, places: "_Places") -> torch.Tensor:
        elements = one_head_view(kv_cache).flatten(1).view(places.dtype)
        entries = self._read_pages(elements, pages.flatten(), places.indices)
        return entries.view(kv_cache.dtype).view(pages.shape[0], -1, self.head_size)


class _Places(NamedTuple):
    """Where the elements of a page are, in order, some of them as one.

    Attributes:
        indices: `[m]` int32.
        dtype: An integer as wide as the elements that are read as one.
    """

    indices: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, indices: torch.Tensor, dtype: torch.dtype) -> Self:
        """Joins neighbours that stay neighbours, up to 8 bytes: fewer and wider reads."""
        size = dtype.itemsize
        while size < 8:
            first, second = indices[::2], indices[1::2]
            if not ((first % 2 == 0) & (second == first + 1)).all():
                break
            indices, size = first // 2, 2 * size
        return cls(indices.contiguous(), {2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


def _learn_places(
    isa: str, dtype: torch.dtype, block_size: int, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index in a flat page of every element of its keys and of its values.

    Returns:
        Two `[block_size * head_size]` int32, in token order.
    """
    num_elements = block_size * head_size
    codes = torch.arange(num_elements)
    found = torch.zeros(2 * num_elements, dtype=torch.int64)
    # Codes go in byte by byte: every integer up to 256 is exact in bfloat16.
    for shift in range(0, (2 * num_elements).bit_length(), 8):
        page = torch.zeros(1, 1, block_size, 2 * head_size, dtype=dtype)
        key, value = (
            ((part >> shift) & 255).to(dtype).view(block_size, head_size)
            for part in (codes, codes + num_elements)
        )
        write_entries(page, key, value, torch.arange(block_size), isa)
        found += page.flatten().to(torch.int64) << shift
    key, value = torch.argsort(found).to(torch.int32).view(2, num_elements)
    return key, value
