"""A pool across layers: the layers of a prompt that share its packed pages are packed together.

What a layer may retain is known once all are scored, so each leaves its candidates here, and the
last one moves the entries of all. Until then every layer's cache is as it was.
"""

import torch

from vllm_kvselect.compaction import pool_slots, retained_slots
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


def pool_moves(
    retention: Retention,
    retention_plan: RetentionPlan,
    blocks: torch.Tensor,
    num_layers: int,
    cache_shape: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the entries that a pool retains are, and where they go, in the memory of all layers.

    All must be read before the first one is written: sources and targets overlap.

    Args:
        retention: What is retained.
        retention_plan: The prompt's plan.
        blocks: Block ids of the prompt, int64.
        num_layers: Layers of the pool.
        cache_shape: Shape of a layer's cache, `[num_blocks, num_kv_heads, block_size, width]`.

    Returns:
        Two lists of slots, int64.
    """
    num_blocks, num_kv_heads, block_size, _ = cache_shape
    first_packed, _, tail_start = retention_plan
    sources = retained_slots(
        retention.retained, tail_start * block_size, blocks, num_kv_heads, block_size, num_blocks
    )
    packed = blocks[first_packed:tail_start]
    return sources, pool_slots(packed, num_kv_heads, block_size, num_layers, num_blocks)
