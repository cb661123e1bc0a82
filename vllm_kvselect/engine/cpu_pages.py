"""PageCodec: reads keys and values out of pages of vLLM's CPU kernel, whatever their inner order.

On CPU a page is all its keys, then all its values, each in an order that suits the kernel's
instruction set ("amx", "vec", "vec16"). The order is learned by writing coded values with vLLM's
own cache-write op and reading them back. It is always a strided one (token and channel in tiles),
so pages are read by one strided copy. Writing needs no codec: the op takes entries in token order.
"""

from typing import NamedTuple

import torch
from vllm import _custom_ops as ops


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
        kv_cache: A layer's cache, `[num_blocks, num_kv_heads, block_size, 2 * head_size]`.
        key: `[num_entries, head_size]`.
        value: `[num_entries, head_size]`.
        slots: `page * block_size + offset`, `[num_entries]` int64.
        isa: The kernel's instruction set, as the layer uses it.
    """
    key_pages, value_pages = one_head_view(kv_cache).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        key.unsqueeze(1), value.unsqueeze(1), key_pages, value_pages, slots, isa
    )


class Layout(NamedTuple):
    """A strided order of the keys, or of the values, of one page.

    Attributes:
        offset: Where the first element is.
        sizes: Sizes of the tiles of the token index, then of those of the channel index.
        strides: Their strides, in elements.
    """

    offset: int
    sizes: list[int]
    strides: list[int]


class PageCodec:
    """The inner order of pages of one kernel, dtype and shape.

    Args:
        isa: The kernel's instruction set.
        dtype: Data type of the cache.
        block_size: Entries per page.
        head_size: Elements per key and per value.

    Raises:
        RuntimeError: If the order is not a strided one; nothing could be read back then.
    """

    def __init__(self, isa: str, dtype: torch.dtype, block_size: int, head_size: int) -> None:
        self.block_size, self.head_size = block_size, head_size
        places = _learn_places(isa, dtype, block_size, head_size)
        self._keys, self._values = (_layout(part) for part in places)

    def read_keys(self, kv_cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Reads the keys of whole blocks in token order.

        Args:
            kv_cache: A layer's cache, `[num_blocks, num_kv_heads, block_size, 2 * head_size]`.
            blocks: Block ids in token order, `[n]` int64.

        Returns:
            `[num_kv_heads, n * block_size, head_size]`.
        """
        return self._read(kv_cache, blocks, self._keys)

    def read_values(self, kv_cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Reads the values of whole blocks in token order; as `read_keys`."""
        return self._read(kv_cache, blocks, self._values)

    def _read(self, kv_cache: torch.Tensor, blocks: torch.Tensor, layout: Layout) -> torch.Tensor:
        num_kv_heads, size = kv_cache.shape[1], self.block_size * self.head_size
        heads = torch.arange(num_kv_heads)[:, None]
        pages = (blocks * num_kv_heads + heads).flatten()
        # Keys and values are one half of the page each.
        half = one_head_view(kv_cache).flatten(1).narrow(1, layout.offset // size * size, size)
        chosen = half.index_select(0, pages)
        tiles = chosen.as_strided(
            (len(pages), *layout.sizes), (size, *layout.strides), layout.offset % size
        )
        return tiles.reshape(num_kv_heads, -1, self.head_size)


def _learn_places(
    isa: str, dtype: torch.dtype, block_size: int, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index in a flat page of every element of its keys and of its values.

    Returns:
        Two `[block_size, head_size]` int64.
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
    key, value = torch.argsort(found).view(2, block_size, head_size)
    return key, value


def _layout(places: torch.Tensor) -> Layout:
    """Finds the strides of learned places, and proves them by the places they give.

    Raises:
        RuntimeError: If no strides give these places.
    """
    offset = int(places[0, 0])
    tiles = [*_tiles((places[:, 0] - offset).tolist()), *_tiles((places[0] - offset).tolist())]
    layout = Layout(offset, [size for size, _ in tiles], [stride for _, stride in tiles])
    memory = torch.arange(offset + places.numel())
    if not torch.equal(
        memory.as_strided(layout.sizes, layout.strides, offset).reshape(places.shape), places
    ):
        raise RuntimeError(
            "the inner order of the CPU kernel's pages is not a strided one; eviction cannot read "
            "this KV cache"
        )
    return layout


def _tiles(offsets: list[int]) -> list[tuple[int, int]]:
    """Splits an index into tiles of constant stride, outermost first: pairs of size and stride."""
    if len(offsets) == 1:
        return []
    stride, run = offsets[1], 1
    while run < len(offsets) and offsets[run] == run * stride:
        run += 1
    size = max(n for n in range(2, run + 1) if len(offsets) % n == 0)
    return [*_tiles(offsets[::size]), (size, stride)]
