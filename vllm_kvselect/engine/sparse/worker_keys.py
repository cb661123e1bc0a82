"""Keys of a sparse prefill, block by block: what a worker keeps of them meanwhile."""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from vllm_kvselect.config import EvictionConfig, Prefill
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.planning.segments import Segments
from vllm_kvselect.prefilling.criticality import Extremes


class SparseLayer(Protocol):
    """What the choice of blocks needs of a layer; `HeadwiseImpl` is one.

    Attributes:
        layer_index: The layer's place in the group.
        num_kv_heads: Its KV heads.
        kv_cache: Its cache, `[num_blocks, num_kv_heads, page_size, 2 * head_size]`.
        kernels: What computes the parts of a choice.
    """

    layer_index: int
    num_kv_heads: int
    kv_cache: torch.Tensor
    kernels: Kernels

    def pages_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Pages of blocks in this layer, `[num_kv_heads, n]` int64, for blocks `[n]` int64."""

    def read_keys(self, pages: torch.Tensor) -> torch.Tensor:
        """Keys of whole pages in token order, `[num_kv_heads, n, head_size]`."""


class KeyBlocks:
    """What stands for the blocks of a prompt's keys in one layer, in memory taken once."""

    def __init__(self, num_blocks: int, block: int) -> None:
        self._num_blocks, self._block = num_blocks, block
        self._kept: torch.Tensor | None = None
        self.num_known = 0

    def known(self, num_blocks: int) -> Extremes:
        """The first blocks' extremes, `[num_kv_heads, num_blocks, head_size]` each."""
        assert self._kept is not None
        largest, smallest = self._kept[:, :, :num_blocks]
        return Extremes(largest, smallest)

    def add(self, key: torch.Tensor, layer: SparseLayer) -> None:
        """Adds the blocks that follow those known.

        Args:
            key: Their keys, `[num_kv_heads, n, head_size]`.
            layer: The layer.
        """
        new = layer.kernels.extremes(key, self._block)
        num_new = new.largest.shape[1]
        added = slice(self.num_known, self.num_known + num_new)
        if self._kept is None:
            shape = (2, len(key), self._num_blocks, key.shape[2])
            self._kept = key.new_empty(shape)
        self._kept[0, :, added], self._kept[1, :, added] = new
        self.num_known += num_new


@dataclass
class SparsePrefill:
    """A request while it is prefilled sparsely; what stands for its keys in each layer fills up."""

    segments: Segments
    config: EvictionConfig
    layers: dict[int, KeyBlocks] = field(default_factory=dict)

    def key_blocks(self, layer_index: int) -> KeyBlocks:
        """What stands for its keys in a layer."""
        if layer_index not in self.layers:
            prefill = self.config.of(Prefill)
            num_blocks = (self.segments.end - self.segments.size) // prefill.prefill_block
            self.layers[layer_index] = KeyBlocks(num_blocks, prefill.prefill_block)
        return self.layers[layer_index]
