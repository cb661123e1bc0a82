"""Drop: one cut of one request, made layer by layer.

What competes are columns: of a prompt its tokens, later the entries that earlier cuts retained and
those behind them. A cut in a prompt is scored in the step that reaches it, right after each layer's
attention, while queries and keys are at hand. The choice follows at once; or, where nobody reads
what is retained before, at the beginning of the next step, so that the first token does not wait
for it. A cut in an answer is made between two steps.

A drafter's layers choose nothing: they retain what layers of the target do (`followed_layers`). So
no method needs anything of them, and what the target retains is what it would be without a drafter.
They are computed once the step's tokens are sampled, and packed after that.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from vllm_kvselect.choice import Retention, needs_values, retain_layer, retain_pool, score_layer
from vllm_kvselect.engine.drop.columns import Columns
from vllm_kvselect.engine.drop.following import following_candidates
from vllm_kvselect.engine.drop.request import Request
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.paging.compaction import packed_slots
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.memory import EntryNumbers
from vllm_kvselect.scoring.value_norms import OutputProjection
from vllm_kvselect.selecting.ranking import Candidates


class DropLayer(Protocol):
    """What a drop needs of a layer; `HeadwiseImpl` is one. Pages count through all layers.

    Attributes:
        layer_index: The layer's place in the group.
        kernels: What computes the parts of a choice.
        output_projection: Its W_O, or None.
    """

    layer_index: int
    kernels: Kernels
    output_projection: OutputProjection | None

    def inputs(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> ScoringInputs:
        """What scorers may read of this layer."""

    def read(self, pages: torch.Tensor, num_competing: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of whole pages in their order, and values of the first of them at least.

        Args:
            pages: Page ids of each head, `[num_kv_heads, n]` int64.
            num_competing: Pages of which values are wanted.

        Returns:
            `[num_kv_heads, n * block_size, head_size]`, the values perhaps fewer.
        """

    def read_values(self, pages: torch.Tensor) -> torch.Tensor:
        """Values of whole pages in their order, `[num_kv_heads, n * block_size, head_size]`."""

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Moves entries from slots to slots, all read before any is written."""


class Drop:
    """A cut that is being made: what a request retains, in all layers of a group.

    Args:
        request: The request, whose next cut it is.
        columns: What it holds up to the cut.
        packed_blocks: Ids of the blocks that the cut packs, int64.
        state: State of the group's layers.
        block_size: Tokens per block.
        waits: Whether the choice waits for `finish`.
    """

    def __init__(
        self,
        request: Request,
        columns: Columns,
        packed_blocks: torch.Tensor,
        state: RetentionState,
        block_size: int,
        waits: bool = False,
    ) -> None:
        assert request.next_cut is not None
        self.request, self.cut = request, request.next_cut
        self.settings, self.columns, self.waits = request.plan.settings, columns, waits
        self.is_pooled = request.method.pooled
        self.num_competing = columns.num_competing(self.cut, block_size)
        self._state, self._block_size = state, block_size
        self._packed_blocks = packed_blocks
        kept = waits or self.is_pooled
        self._kept = KeptCandidates(state.num_choosing) if kept else None
        self._waiting: list[tuple[DropLayer, Candidates]] = []
        self._to_follow: dict[int, Retention] = {}
        self._chosen_by: DropLayer | None = None

    @property
    def key(self) -> torch.Tensor:
        """Id of the first packed block, by which the state knows what is retained, `[1]` int64."""
        return self._packed_blocks[:1]

    def make(self, layers: Sequence[DropLayer]) -> None:
        """Makes the cut in all layers, from what is in the cache.

        Args:
            layers: The layers of the group that choose, in order.
        """
        begin, end, queries = self.request.first_query(self.cut), self.cut.position, None
        if begin < end:
            queries = self.request.progress.queries.of_all_layers(begin, end)
        for layer in layers:
            query = None if queries is None else queries[layer.layer_index]
            self.score(layer, *self.read(layer), query)
        self._follow()

    def read(self, layer: DropLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys up to the cut, and values at least of what competes, from the cache."""
        pages = self.columns.pages[layer.layer_index]
        return layer.read(pages, self.num_competing // self._block_size)

    def score(
        self,
        layer: DropLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        query: torch.Tensor | None = None,
    ) -> None:
        """Scores a layer, and chooses what it retains unless that waits.

        Args:
            layer: The layer; they come in order.
            key: Keys of the columns, or more, `[num_kv_heads, n, head_size]`.
            value: Values at least of what competes.
            query: Queries that the cut looks through; None for those kept of this layer.
        """
        key, value = key[:, : self.columns.num_entries], value[:, : self.num_competing]
        candidates = self.candidates(layer, self._inputs(layer, key, value, query))
        is_last = layer.layer_index == self._state.num_choosing - 1
        if self._kept is not None:
            candidates = self._kept.keep(layer.layer_index, candidates)
        if is_last and self._numbers is None:
            self.request.progress.memory = None
        if self.waits:
            self._waiting.append((layer, candidates))
            return
        if not self.is_pooled:
            self._choose(layer, candidates, value)
        if is_last:
            self._complete(layer)

    def finish(self) -> None:
        """Chooses in all layers that wait, and packs those that follow, from the cache."""
        with self._state.later_stopwatch:
            for layer, candidates in self._waiting if not self.is_pooled else ():
                value = None
                if needs_values(candidates, self.settings):
                    num_pages = self.num_competing // self._block_size
                    pages = self.columns.pages[layer.layer_index, :, :num_pages]
                    value = layer.read_values(pages.contiguous())
                self._choose(layer, candidates, value)
            if self._waiting:
                self._complete(self._waiting[-1][0])
            self._follow()

    def candidates(self, layer: DropLayer, inputs: ScoringInputs) -> Candidates:
        """What competes in a layer."""
        return score_layer(inputs, self.settings, layer.kernels)

    def retention(
        self, layer: DropLayer, candidates: Candidates, value: torch.Tensor | None
    ) -> Retention:
        """What is retained of a layer."""
        sizes = (self.cut.num_packed, self._block_size)
        projection = layer.output_projection
        return retain_layer(candidates, value, projection, *sizes, self.settings, layer.kernels)

    def retention_of_all(self, layer: DropLayer, candidates: Candidates) -> Retention:
        """What is retained of all layers, which share the packed pages."""
        sizes = (self.cut.num_packed, self._block_size)
        return retain_pool(candidates, *sizes, self.settings, layer.kernels)

    @property
    def _numbers(self) -> EntryNumbers | None:
        """Numbers that move with what is retained, where later cuts need them."""
        memory, is_last = self.request.progress.memory, self.cut is self.request.plan.cuts[-1]
        return memory if isinstance(memory, EntryNumbers) and not is_last else None

    def _inputs(
        self,
        layer: DropLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        query: torch.Tensor | None,
    ) -> ScoringInputs:
        """What the scorer reads: the layer's tensors, completed by what was remembered."""
        index, progress, num_absent = layer.layer_index, self.request.progress, None
        if query is None:
            begin, end = self.request.first_query(self.cut), self.cut.position
            query = key.new_empty(0, *key.shape[::2])  # all that is needed of them is remembered
            if begin < end:
                query = progress.queries.of_layer(index, begin, end)
        if self.columns.num_absent is not None:
            num_absent = self.columns.num_absent[index]
        inputs = replace(layer.inputs(query, key, value), num_absent=num_absent)
        memory = self.request.remembered_by(self._state.num_choosing)
        if memory is None:
            return inputs
        if index == 0 and isinstance(memory, EntryNumbers):
            self._lay_out(memory)
        inputs = memory.complete(inputs, layer.kernels.twin)
        if self._numbers is not None:
            self._numbers.keep(inputs)
        memory.release(index)
        return inputs

    def _lay_out(self, numbers: EntryNumbers) -> None:
        """Lays numbers out in the columns; where a column is a token, they are so already."""
        if self.columns.num_absent is not None:
            sizes = self.columns.num_entries, self.columns.num_packed
            numbers.lay_out(*sizes, self.columns.num_absent[: self._state.num_choosing])

    def _choose(self, layer: DropLayer, candidates: Candidates, value: torch.Tensor | None) -> None:
        """Chooses and moves what a layer retains by itself."""
        index = layer.layer_index
        retention = self.retention(layer, candidates, value)
        self._pack(layer, retention, slice(index, index + 1))
        if index in self._state.followed:
            self._to_follow[index] = retention

    def _choose_together(self, layer: DropLayer) -> None:
        """Chooses and moves what all layers retain."""
        assert self._kept is not None
        retention = self.retention_of_all(layer, self._kept.stacked)
        self._pack(layer, retention, slice(0, self._state.num_choosing))

    def _follow(self) -> None:
        """Packs the layers that follow others, if all of those have chosen, and ends the cut.

        Where layers share pages, these share theirs among themselves: what the followed ones retain
        might not fit.
        """
        begin, followed, layer = self._state.num_choosing, self._state.followed, self._chosen_by
        if not followed or layer is None:
            return
        if self.is_pooled:
            self._follow_together(layer, slice(begin, self._state.num_layers))
        else:
            for place, index in enumerate(followed, begin):
                self._pack(layer, self._to_follow[index], slice(place, place + 1))
        self._state.complete(self.request, self.cut, self.key)

    def _follow_together(self, layer: DropLayer, layers: slice) -> None:
        assert self._kept is not None
        columns, progress = self.columns, self.request.progress
        absent = None if columns.num_absent is None else columns.num_absent[layers]
        candidates = following_candidates(
            self._kept.stacked, self._state.followed, progress.followed, absent, columns.num_packed
        )
        retention = self.retention_of_all(layer, candidates)
        self._pack(layer, retention, layers)
        is_last = self.cut is self.request.plan.cuts[-1]
        progress.followed = None if is_last else candidates.of_entries(retention.retained)

    def _pack(self, layer: DropLayer, retention: Retention, layers: slice) -> None:
        """Moves what some layers retain, and takes note of where it is."""
        self._move(layer, retention.retained, layers)
        num_kv_heads = self._state.num_kv_heads
        offsets = retention.offsets + layers.start * self.cut.num_packed * num_kv_heads
        # [num_layers * num_kv_heads + 1] -> [num_layers, num_kv_heads + 1], ends shared
        self._state.store(self.key, offsets.unfold(0, num_kv_heads + 1, num_kv_heads), layers)

    def _move(self, layer: DropLayer, retained: torch.Tensor, layers: slice) -> None:
        """Moves what some layers retain into their packed blocks, and its numbers with it.

        Args:
            layer: One of the layers.
            retained: `(layer * num_kv_heads + head) * num_competing + column`, layers counted from
                the first one, ascending, `[n]` int64.
            layers: The layers.
        """
        size, pages = self._block_size, self.columns.pages[layers].flatten(0, 1)
        owner, column = retained // self.num_competing, retained % self.num_competing
        sources = pages[owner, column // size] * size + column % size
        num_blocks = len(self._state.offsets)
        of_layers = torch.arange(layers.start, layers.stop, device=self._packed_blocks.device)
        blocks = (of_layers[:, None] * num_blocks + self._packed_blocks).flatten()
        layer.move(sources, packed_slots(blocks, self._state.num_kv_heads, size))
        if (numbers := self._numbers) is not None and layers.start < self._state.num_choosing:
            numbers.retain(layers.start, self.num_competing, retained)

    def _complete(self, layer: DropLayer) -> None:
        """Takes note that the cut is made in all layers that choose."""
        if self.is_pooled:
            self._choose_together(layer)
        if (numbers := self._numbers) is not None:
            numbers.settle(self.cut.position, self.num_competing)
        self._chosen_by = layer
        # Within a step a drafter's layers are computed later.
        if not self._state.followed:
            self._state.complete(self.request, self.cut, self.key)


class KeptCandidates:
    """Candidates of the layers of a request, in memory that is taken when the first one comes.

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
