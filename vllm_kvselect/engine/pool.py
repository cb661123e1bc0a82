"""A pool across layers: the layers of a prompt that share its packed pages are packed together.

What a layer may retain is known once all are scored, so each leaves its candidates here, and the
last one moves the entries of all. Until then every layer's cache is as it was.
"""

import torch

from vllm_kvselect.compaction import pool_slots, retained_slots
from vllm_kvselect.engine.cpu_pages import PageCodec, all_layers, write_entries
from vllm_kvselect.methods import Retention
from vllm_kvselect.ranking import Candidates
from vllm_kvselect.retention import RetentionPlan


class Pool:
    """Candidates of the layers of one prompt, in the step that completes it.

    Args:
        num_layers: Layers that share the pages.
    """

    def __init__(self, num_layers: int) -> None:
        self._layers: dict[int, Candidates] = {}
        self._num_layers = num_layers

    def join(self, layer_index: int, candidates: Candidates) -> Candidates | None:
        """Adds a layer.

        Args:
            layer_index: The layer's place in the group.
            candidates: What competes in it, `[num_kv_heads, num_tokens]` each.

        Returns:
            The candidates of all layers in order, stacked, if this was the last one; else None.
        """
        self._layers[layer_index] = candidates
        if len(self._layers) < self._num_layers:
            return None
        stacked = Candidates.stack([self._layers[index] for index in range(self._num_layers)])
        self._layers.clear()
        return stacked


def move_entries(
    kv_cache: torch.Tensor,
    retention: Retention,
    retention_plan: RetentionPlan,
    blocks: torch.Tensor,
    num_layers: int,
    codec: PageCodec,
    isa: str,
) -> None:
    """Moves what a pool retains into its packed pages, for all layers at once.

    All entries are read before the first one is written: sources and targets overlap.

    Args:
        kv_cache: The cache of one of the layers, `[num_blocks, num_kv_heads, block_size,
            2 * head_size]`.
        retention: What is retained.
        retention_plan: The prompt's plan.
        blocks: Block ids of the prompt, int64.
        num_layers: Layers of the pool.
        codec: Inner order of the pages.
        isa: The kernel's instruction set.
    """
    (num_blocks, num_kv_heads, block_size, _), memory = kv_cache.shape, all_layers(kv_cache)
    first_packed, _, tail_start = retention_plan
    sources = retained_slots(
        retention.retained, tail_start * block_size, blocks, num_kv_heads, block_size, num_blocks
    )
    packed = blocks[first_packed:tail_start]
    targets = pool_slots(packed, num_kv_heads, block_size, num_layers, num_blocks)
    key, value = codec.read_entries(memory, sources)
    write_entries(memory, key, value, targets, isa)
