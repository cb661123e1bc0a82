"""Rounds: requests that generate are brought back to their budget, again and again.

A round chooses among what is retained and the tail before the new window. It is made between two
steps: when the batch after it is split, before anything of that is computed.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple, Protocol

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvselect.engine.step.arriving import Arriving
from vllm_kvselect.engine.step.memory import all_layers
from vllm_kvselect.engine.step.page_tables import SettledRows
from vllm_kvselect.engine.step.received import Received
from vllm_kvselect.engine.step.request import Request
from vllm_kvselect.engine.step.state import RetentionState
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.methods.choice import Retention, retain, retain_pool, score_layer
from vllm_kvselect.paging.compaction import pool_slots, through_layers
from vllm_kvselect.retention import Cut
from vllm_kvselect.scoring.h2o import accumulate
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.selecting.ranking import Candidates


class RoundLayer(Protocol):
    """What a round needs of a layer; the backends' impls are.

    Attributes:
        layer_index: The layer's place in the group.
        kv_cache: Its cache, `[num_blocks, num_kv_heads, block_size, 2 * head_size]`.
        kernels: What computes the parts of a choice.
    """

    layer_index: int
    kv_cache: torch.Tensor
    kernels: Kernels

    def inputs(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> ScoringInputs:
        """What scorers may read of this layer."""

    def read_held(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole pages in the memory of all layers, in the pages' order.

        Args:
            pages: Page ids of each head, `[num_kv_heads, n]` int64.

        Returns:
            `[num_kv_heads, n * block_size, head_size]` each.
        """

    def move_slots(self, cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Moves entries from slots to slots of a cache."""


class Held(NamedTuple):
    """What a request holds before a round, as columns that end with the latest entry in all heads.

    Attributes:
        pages: Page ids in the memory of all layers, `[num_layers, num_kv_heads, n]` int64; 0 where
            a head has none.
        num_absent: First columns of each head without an entry, `[num_layers, num_kv_heads]` int64.
        num_entries: Columns up to the round.
        num_competing: Columns before the new tail, whole pages.
    """

    pages: torch.Tensor
    num_absent: torch.Tensor
    num_entries: int
    num_competing: int


class Rounds:
    """Makes rounds, in all layers of a group. Nothing here waits for a device.

    Args:
        layers: The layers, in order.
        state: Their state.
        block_size: Tokens per block.
    """

    def __init__(
        self, layers: Sequence[RoundLayer], state: RetentionState, block_size: int
    ) -> None:
        self._layers, self._state, self._block_size = layers, state, block_size

    def make(self, request: Request, block_ids: torch.Tensor) -> None:
        """Makes the round of a request that is due, or adds up what a later one needs.

        Args:
            request: The request.
            block_ids: Its block table, `[max_num_blocks]`.
        """
        with self._state.stopwatch:
            if (cut := request.due_round) is not None:
                self._make(request, cut, block_ids)
            else:
                self._catch_up(request, block_ids)

    def _make(self, request: Request, cut: Cut, block_ids: torch.Tensor) -> None:
        blocks = block_ids[: cut.tail_start + 1].to(torch.int64)
        first_packed_block = blocks[cut.first_packed : cut.first_packed + 1]
        held = self._held(request.cut, cut, block_ids, request.longest_run)
        is_first = request.cut is None or request.cut.position <= request.num_prompt_tokens
        if request.eviction.keep_prompt and is_first:
            request.num_kept = self._of_prompt(request.num_prompt_tokens, cut, held)
        sums = self._received(request, cut.position, held) if request.has_sums else None
        retentions = self._choose(request, cut, held, sums)
        per_layer = self._state.num_kv_heads * held.num_competing
        retained = through_layers([each.retained for each in retentions], per_layer)
        self._move(cut, held, blocks, retained)
        if sums is not None:
            competing = held.num_competing
            request.received = Received.after_cut(cut.position, sums, competing, retained)
        self._state.store(first_packed_block, self._offsets(retentions))
        self._state.complete_round(request, cut, first_packed_block)

    def _catch_up(self, request: Request, block_ids: torch.Tensor) -> None:
        """Adds up what entries have received since the last time, so that no queries pile up."""
        last, position = request.cut, request.num_computed
        now = replace(last, position=position) if last else Cut(position, 0, 0, 0)
        held = self._held(last, now, block_ids, request.longest_run)
        sums = self._received(request, position, held)
        queries = self._queries(request, position)
        for index, layer in enumerate(self._layers):
            sums[index] += self._attention(layer, queries[index], held)
        # The tail begins where it began: what competes are the packed entries.
        packed = held.num_competing, held.num_absent
        request.received = request.take_received().after_more(position, sums, *packed)
        request.seen.clear()

    def _held(
        self, last: Cut | None, cut: Cut, block_ids: torch.Tensor, longest_run: Arriving | None
    ) -> Held:
        """Where the request's entries are: everything if nothing was dropped before."""
        first_packed, tail_start = (last.first_packed, last.tail_start) if last else (0, 0)
        key = block_ids[first_packed : first_packed + 1].to(torch.int64)
        if not last:
            key = torch.zeros_like(key)  # block 0 has no packed pages
        num_columns = ceil(cut.position / self._block_size) - tail_start
        if last:
            assert longest_run is not None
            num_columns += int(longest_run)
        integers = np.array([cut.position, first_packed, tail_start], dtype=np.int32)
        position, first, tail = async_tensor_h2d(integers, block_ids.device).split(1)
        row = SettledRows(block_ids[None], position, first, tail, key)
        pages, lengths = row.page_table(self._state.offsets, self._block_size, width=num_columns)
        num_pages = -(-lengths.to(torch.int64) // self._block_size)
        num_missing = num_columns - num_pages
        columns = torch.arange(num_columns, device=pages.device) - num_missing[..., None]
        aligned = pages.to(torch.int64).gather(2, columns.clamp(min=0))
        aligned.masked_fill_(columns < 0, 0)
        unfilled = -cut.position % self._block_size
        num_entries = num_columns * self._block_size - unfilled
        num_tail = cut.position - cut.tail_start * self._block_size
        return Held(aligned, num_missing * self._block_size, num_entries, num_entries - num_tail)

    def _of_prompt(self, num_prompt_tokens: int, cut: Cut, held: Held) -> torch.Tensor:
        """Entries that each head holds in the prompt's blocks, before anything else is dropped.

        With those of the first generated tokens that share the prompt's last block.
        """
        size = self._block_size
        num_blocks_behind = ceil(cut.position / size) - ceil(num_prompt_tokens / size)
        end = (ceil(held.num_entries / size) - num_blocks_behind) * size
        return end - held.num_absent

    def _received(self, request: Request, position: int, held: Held) -> torch.Tensor:
        """What entries have received so far, in columns, `[num_layers, num_kv_heads, num_entries]`.

        Nothing yet of the queries that are still to be added up.
        """
        begin = request.cut.tail_start * self._block_size if request.cut else 0
        num_packed = held.num_entries - (position - begin)
        return request.take_received().in_columns(held.num_entries, num_packed, held.num_absent)

    @staticmethod
    def _queries(request: Request, position: int) -> torch.Tensor:
        """What is looked through at a position, `[num_layers, n, num_heads, head_size]`."""
        if request.has_sums:
            first = request.take_received().position
        else:
            first = position - request.eviction.window
        seen = (request.seen[place] for place in range(first, position))
        return torch.stack([step.of_token(place) for step, place in seen], dim=1)

    def _choose(
        self, request: Request, cut: Cut, held: Held, sums: torch.Tensor | None
    ) -> list[Retention]:
        """What is retained: of each layer, or of all together.

        Adds to `sums`, if there are any, what entries have received since.
        """
        eviction, sizes = request.eviction, (cut.num_packed, self._block_size)
        queries = self._queries(request, cut.position)

        def inputs(index: int, layer: RoundLayer) -> ScoringInputs:
            read = self._inputs(layer, queries[index], held, request.num_kept)
            if sums is None:
                return read
            sums[index] += accumulate(read)
            return replace(read, received=sums[index])

        layers = (  # one by one: a layer's entries are read as they are needed
            (layer.kernels, inputs(index, layer)) for index, layer in enumerate(self._layers)
        )
        if request.method.pooled:
            scored = [score_layer(inputs, eviction, kernels) for kernels, inputs in layers]
            kernels = self._layers[0].kernels
            return [retain_pool(Candidates.stack(scored), *sizes, eviction, kernels)]
        return [retain(inputs, *sizes, eviction, kernels) for kernels, inputs in layers]

    def _attention(self, layer: RoundLayer, query: torch.Tensor, held: Held) -> torch.Tensor:
        """Attention that all entries of a layer receive from queries, `[num_kv_heads, n]`."""
        return accumulate(self._inputs(layer, query, held, None))

    @staticmethod
    def _inputs(
        layer: RoundLayer, query: torch.Tensor, held: Held, num_kept: torch.Tensor | None
    ) -> ScoringInputs:
        """What competes in a layer."""
        index = layer.layer_index
        key, value = layer.read_held(held.pages[index])
        inputs = layer.inputs(query, key[:, : held.num_entries], value[:, : held.num_competing])
        kept = None if num_kept is None else num_kept[index]
        return replace(inputs, num_absent=held.num_absent[index], num_kept=kept)

    def _move(self, cut: Cut, held: Held, blocks: torch.Tensor, retained: torch.Tensor) -> None:
        """Moves what all layers retain, each alone or all together, into the packed blocks."""
        num_layers, num_kv_heads, _ = held.pages.shape
        owner, column = retained // held.num_competing, retained % held.num_competing
        page = held.pages.flatten(0, 1)[owner, column // self._block_size]
        sources = page * self._block_size + column % self._block_size
        layer = self._layers[0]
        packed = blocks[cut.first_packed : cut.tail_start]
        num_blocks = layer.kv_cache.shape[0]
        targets = pool_slots(packed, num_kv_heads, self._block_size, num_layers, num_blocks)
        layer.move_slots(all_layers(layer.kv_cache), sources, targets)

    def _offsets(self, retentions: Sequence[Retention]) -> torch.Tensor:
        """Where the heads' pages start, `[num_layers, num_kv_heads + 1]`."""
        num_kv_heads = self._state.num_kv_heads
        if len(retentions) == 1:
            return retentions[0].offsets.unfold(0, num_kv_heads + 1, num_kv_heads)
        return torch.stack(
            [each.offsets + index * each.offsets[-1] for index, each in enumerate(retentions)]
        )
