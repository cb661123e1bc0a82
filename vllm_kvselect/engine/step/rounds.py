"""Rounds: requests that generate are brought back to their budget, again and again.

A round chooses among what is retained and the tail before the new window. It is made between two
steps: when the batch after it is split, before anything of that is computed.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple, Protocol

import torch

from vllm_kvselect.engine.step.memory import all_layers
from vllm_kvselect.engine.step.page_tables import SettledRows
from vllm_kvselect.engine.step.request import Request
from vllm_kvselect.engine.step.state import RetentionState
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.methods.choice import Retention, retain, retain_pool, score_layer
from vllm_kvselect.paging.compaction import pool_slots
from vllm_kvselect.retention import Cut
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.selecting.ranking import Candidates


class RoundLayer(Protocol):
    """What a round needs of a layer; the CPU backend's impl is one.

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
    """Makes rounds, in all layers of a group.

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
        """Makes the round of a request that is due.

        Args:
            request: The request.
            block_ids: Its block table, `[max_num_blocks]`.
        """
        cut = request.due_round
        assert cut is not None
        with self._state.stopwatch:
            blocks = block_ids[: cut.tail_start + 1].to(torch.int64)
            held = self._held(request.cut, cut, block_ids)
            is_first = request.cut is None or request.cut.position <= request.num_prompt_tokens
            if request.eviction.keep_prompt and is_first:
                request.num_kept = self._of_prompt(request.num_prompt_tokens, cut, held)
            retentions = self._choose(request, cut, held)
            self._move(cut, held, blocks, [retention.retained for retention in retentions])
            offsets = self._offsets(retentions)
            self._state.store(int(blocks[cut.first_packed]), offsets)
        self._state.complete_round(request, cut)

    def _held(self, last: Cut | None, cut: Cut, block_ids: torch.Tensor) -> Held:
        """Where the request's entries are: everything if nothing was dropped before."""
        first_packed, tail_start = (last.first_packed, last.tail_start) if last else (0, 0)
        # Block 0 has no packed pages.
        key = block_ids[first_packed] if last else block_ids.new_zeros(())
        row = SettledRows(
            block_table=block_ids[None],
            seq_lens=torch.tensor([cut.position]),
            first_packed=torch.tensor([first_packed]),
            tail_start=torch.tensor([tail_start]),
            first_packed_blocks=key[None].to(torch.int64),
        )
        pages, lengths = row.page_table(self._state.offsets, self._block_size)
        num_pages = -(-lengths.to(torch.int64) // self._block_size)
        num_columns = pages.shape[2]
        num_missing = num_columns - num_pages
        columns = torch.arange(num_columns) - num_missing[..., None]
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

    def _choose(self, request: Request, cut: Cut, held: Held) -> list[Retention]:
        """What is retained: of each layer, or of all together."""
        eviction, sizes = request.eviction, (cut.num_packed, self._block_size)
        window = range(cut.position - eviction.window, cut.position)
        seen = (request.seen[position] for position in window)
        # [num_layers, window, num_heads, head_size]
        queries = torch.stack([step.of_token(place) for step, place in seen], dim=1)
        layers = (  # one by one: a layer's entries are read as they are needed
            (layer.kernels, self._inputs(layer, queries[index], held, request.num_kept))
            for index, layer in enumerate(self._layers)
        )
        if request.method.pooled:
            scored = [score_layer(inputs, eviction, kernels) for kernels, inputs in layers]
            kernels = self._layers[0].kernels
            return [retain_pool(Candidates.stack(scored), *sizes, eviction, kernels)]
        return [retain(inputs, *sizes, eviction, kernels) for kernels, inputs in layers]

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

    def _move(
        self, cut: Cut, held: Held, blocks: torch.Tensor, retained: Sequence[torch.Tensor]
    ) -> None:
        """Moves what all layers retain, each alone or all together, into the packed blocks."""
        num_layers, num_kv_heads, _ = held.pages.shape
        per_layer = num_kv_heads * held.num_competing
        flat = torch.cat([part + index * per_layer for index, part in enumerate(retained)])
        owner, column = flat // held.num_competing, flat % held.num_competing
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
