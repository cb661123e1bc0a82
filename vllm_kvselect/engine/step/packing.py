"""Packing: one cut of one request, made layer by layer."""

from functools import cached_property
from typing import Protocol

import torch

from vllm_kvselect.engine.step.memory import all_layers
from vllm_kvselect.engine.step.received import Received
from vllm_kvselect.engine.step.request import Phase, Request
from vllm_kvselect.engine.step.state import RetentionState
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.methods.choice import (
    Retention,
    needs_values,
    retain_layer,
    retain_pool,
    score_layer,
)
from vllm_kvselect.paging.compaction import (
    head_pages,
    packed_slots,
    pool_slots,
    retained_slots,
    through_layers,
)
from vllm_kvselect.scoring.h2o import AttentionSums
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.value_norms import OutputProjection
from vllm_kvselect.selecting.ranking import Candidates


class PackingLayer(Protocol):
    """What a cut needs of a layer; `HeadwiseImpl` is one.

    Attributes:
        layer_index: The layer's place in the group.
        kv_cache: Its cache, `[num_blocks, num_kv_heads, block_size, 2 * head_size]`.
        kernels: What computes the parts of a choice.
        output_projection: Its W_O, or None.
    """

    layer_index: int
    kv_cache: torch.Tensor
    kernels: Kernels
    output_projection: OutputProjection | None

    def read_values(self, pages: torch.Tensor) -> torch.Tensor:
        """Values of whole pages in token order, `[num_kv_heads, n, head_size]`."""

    def move_entries(self, retained: torch.Tensor, packing: "Packing") -> None:
        """Moves what the layer retains into the packed blocks."""

    def move_slots(self, cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Moves entries from slots to slots of a cache."""


class Packing:
    """A cut that is being made: what a request retains, in all layers of a group.

    Every layer is scored in the step that reaches the cut, while queries and keys are at hand. The
    choice follows at once; or, where nobody reads what is retained before, at the beginning of the
    next step, so that the first token does not wait for it.

    Args:
        request: The request, observed up to the cut.
        state: State of the group's layers.
        blocks: Block ids up to the cut, int64.
        first_packed_block: Id of the first packed block, the key of the state; where block tables
            live on a device, `[1]` int64 on it.
        block_size: Tokens per block.
        waits: Whether the choice waits for `finish_all`.
    """

    def __init__(
        self,
        request: Request,
        state: RetentionState,
        blocks: torch.Tensor,
        first_packed_block: int | torch.Tensor,
        block_size: int,
        waits: bool,
    ) -> None:
        assert request.cut is not None
        self.request, self.cut, self.eviction = request, request.cut, request.eviction
        self.blocks, self.first_packed_block = blocks, first_packed_block
        self.block_size, self.waits = block_size, waits
        self.is_pooled = request.method.pooled
        self._state = state
        self._kept = KeptCandidates(state.num_layers) if waits or self.is_pooled else None
        self._waiting: list[tuple[PackingLayer, Candidates]] = []
        self._sums: torch.Tensor | None = None
        self._retained: list[torch.Tensor] = []

    @cached_property
    def pages(self) -> torch.Tensor:
        """Pages up to the cut, the same in every layer, `[num_kv_heads, num_blocks]` int64."""
        return head_pages(self.blocks, self._state.num_kv_heads)

    @cached_property
    def competing_pages(self) -> torch.Tensor:
        """Those before the tail."""
        return self.pages[:, : self.cut.tail_start].contiguous()

    @cached_property
    def packed_blocks(self) -> torch.Tensor:
        """Ids of the packed blocks, `[num_packed]` int64."""
        return self.blocks[self.cut.first_packed : self.cut.tail_start]

    @cached_property
    def slots(self) -> torch.Tensor:
        """Where a layer's retained entries go, in the one-head view of its cache, int64."""
        return packed_slots(self.packed_blocks, self._state.num_kv_heads, self.block_size)

    @property
    def num_competing(self) -> int:
        """Tokens before the tail: those whose entries compete."""
        return self.cut.tail_start * self.block_size

    def score(self, layer: PackingLayer, inputs: ScoringInputs) -> None:
        """Scores a layer, and chooses what it retains unless that waits.

        Args:
            layer: The layer; they come in order.
            inputs: Keys up to the cut, and values of the entries that compete.
        """
        observer = self.request.observed_by(self._state.num_layers)
        candidates = score_layer(inputs, self.eviction, layer.kernels, observer)
        observer.release(layer.layer_index)
        if self._kept is not None:
            candidates = self._kept.keep(layer.layer_index, candidates)
        if self._is_last(layer):
            if self.request.has_sums:
                assert isinstance(observer, AttentionSums)
                self._sums = observer.sums
            self.request.phase, self.request.observer = Phase.SCORED, None
        if self.waits:
            self._waiting.append((layer, candidates))
        else:
            self.finish(layer, candidates, inputs.value)

    def finish_all(self) -> None:
        """Chooses in all layers that wait; what else is needed is in the cache."""
        with self._state.later_stopwatch:
            for layer, candidates in self._waiting:
                value = None
                if not self.is_pooled and needs_values(candidates, self.eviction):
                    value = layer.read_values(self.competing_pages)
                self.finish(layer, candidates, value)

    def finish(
        self, layer: PackingLayer, candidates: Candidates, value: torch.Tensor | None
    ) -> None:
        """Chooses from a layer's candidates and moves what is retained.

        In a pool the last layer does so for all.

        Args:
            layer: The layer; they come in order.
            candidates: Its candidates.
            value: Values of the entries that compete; None will do unless norms are still needed.
        """
        if not self.is_pooled:
            retention = self.choose(layer, candidates, value)
            if self.request.has_sums:
                self._retained.append(retention.retained)
            layer.move_entries(retention.retained, self)
            offsets = retention.offsets + layer.layer_index * retention.offsets[-1]
            self._state.store(self.first_packed_block, offsets, layer.layer_index)
        elif self._is_last(layer):
            self._finish_pool(layer)
        if self._is_last(layer):
            if self._sums is not None:
                retained = through_layers(
                    self._retained, self._state.num_kv_heads * self.num_competing
                )
                self.request.received = Received.after_cut(
                    self.cut.position, self._sums, self.num_competing, retained
                )
            self.request.phase, self.request.packing = Phase.PACKED, None
            self._state.complete(self.request, self.first_packed_block)

    def choose(
        self, layer: PackingLayer, candidates: Candidates, value: torch.Tensor | None
    ) -> Retention:
        """Chooses the entries of a layer."""
        sizes = (self.cut.num_packed, self.block_size)
        projection = layer.output_projection
        return retain_layer(candidates, value, projection, *sizes, self.eviction, layer.kernels)

    def choose_pool(self, layer: PackingLayer) -> Retention:
        """Chooses the entries of all layers from their candidates."""
        assert self._kept is not None
        sizes = (self.cut.num_packed, self.block_size)
        return retain_pool(self._kept.stacked, *sizes, self.eviction, layer.kernels)

    def _finish_pool(self, layer: PackingLayer) -> None:
        retention = self.choose_pool(layer)
        num_blocks, num_kv_heads, block_size, _ = layer.kv_cache.shape
        sizes = (num_kv_heads, block_size)
        sources = retained_slots(
            retention.retained, self.num_competing, self.blocks, *sizes, num_blocks
        )
        targets = pool_slots(self.packed_blocks, *sizes, self._state.num_layers, num_blocks)
        layer.move_slots(all_layers(layer.kv_cache), sources, targets)
        # [num_layers * num_kv_heads + 1] -> [num_layers, num_kv_heads + 1], ends shared
        by_layer = retention.offsets.unfold(0, num_kv_heads + 1, num_kv_heads)
        self._state.store(self.first_packed_block, by_layer)

    def _is_last(self, layer: PackingLayer) -> bool:
        return layer.layer_index == self._state.num_layers - 1


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
