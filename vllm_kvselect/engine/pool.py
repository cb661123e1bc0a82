"""Candidates kept for later, of all layers: until all are scored, or until the next step.

In a pool the layers of a prompt share its packed pages. What a layer may retain is known once all
are scored, so the last one moves the entries of all. Until then every layer's cache is as it was.
"""

import torch

from vllm_kvselect.compaction import pool_slots, retained_slots
from vllm_kvselect.methods import Retention
from vllm_kvselect.ranking import Candidates
from vllm_kvselect.retention import Cut


class KeptCandidates:
    """Candidates of the layers of a prompt, in memory that is taken when the first one comes.

    Small pieces kept in between a forward pass's large tensors would scatter what the allocator has
    to reuse.

    Args:
        num_layers: Layers of the group.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers, self._num_kept = num_layers, 0
        self._stacked: Candidates | None = None

    @property
    def stacked(self) -> Candidates:
        """The layers in order, `[num_layers, num_kv_heads, num_tokens]` each; all must be kept."""
        assert self._stacked is not None
        assert self._num_kept == self._num_layers
        return self._stacked

    def keep(self, layer_index: int, candidates: Candidates) -> Candidates:
        """Copies the candidates of a layer.

        Args:
            layer_index: The layer's place in the group.
            candidates: What competes in it, `[num_kv_heads, num_tokens]` each.

        Returns:
            The copies.
        """
        if self._stacked is None:
            self._stacked = Candidates.empty(self._num_layers, candidates)
        self._num_kept += 1
        kept = self._stacked.of_layer(layer_index)
        for copy, part in zip(kept, candidates, strict=True):
            if copy is not None and part is not None:
                copy.copy_(part)
        return kept


def pool_moves(
    retention: Retention,
    cut: Cut,
    blocks: torch.Tensor,
    num_layers: int,
    cache_shape: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the entries that a pool retains are, and where they go, in the memory of all layers.

    All must be read before the first one is written: sources and targets overlap.

    Args:
        retention: What is retained.
        cut: The cut that is made.
        blocks: Block ids of the prompt, int64.
        num_layers: Layers of the pool.
        cache_shape: Shape of a layer's cache, `[num_blocks, num_kv_heads, block_size, width]`.

    Returns:
        Two lists of slots, int64.
    """
    num_blocks, num_kv_heads, block_size, _ = cache_shape
    sources = retained_slots(
        retention.retained,
        cut.tail_start * block_size,
        blocks,
        num_kv_heads,
        block_size,
        num_blocks,
    )
    packed = blocks[cut.first_packed : cut.tail_start]
    return sources, pool_slots(packed, num_kv_heads, block_size, num_layers, num_blocks)
