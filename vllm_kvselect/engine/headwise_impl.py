"""What the backends' layers have in common: the order in which a split batch is computed.

Attention comes first, then selection for the rows whose prompt is complete, then the tokens past
their prompts. A batch in which nobody drops anything takes vLLM's path from end to end.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionLayer

from vllm_kvselect.compaction import head_pages, retained_slots
from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.batch import Completion
from vllm_kvselect.engine.headwise import HeadwiseMetadata
from vllm_kvselect.engine.headwise_batch import Call, HeadwiseBatch
from vllm_kvselect.engine.memory import all_layers
from vllm_kvselect.engine.pool import pool_moves
from vllm_kvselect.engine.state import RetentionState
from vllm_kvselect.engine.whole_prompt import PromptChunk, scorer_of
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.methods import (
    Retention,
    needs_values,
    retain_layer,
    retain_pool,
    score_layer,
)
from vllm_kvselect.page_table import PageTable
from vllm_kvselect.ranking import Candidates
from vllm_kvselect.scoring.value_norms import OutputProjection


class HeadwiseImpl(ABC):
    """A layer: vLLM's attention, plus selection, packing and the one-head view.

    Attributes:
        output_projection: The layer's W_O, bound by the worker for methods that need it.
    """

    num_kv_heads: int
    num_queries_per_kv: int
    head_size: int
    scale: float
    sinks: torch.Tensor | None
    output_projection: OutputProjection | None = None

    def _connect(self, layer_index: int, state: RetentionState, kernels: Kernels) -> None:
        """Connects the layer to its group.

        Args:
            layer_index: The layer's place in the group.
            state: State of the group's layers.
            kernels: What computes the parts of a choice.
        """
        self._layer_index, self._state, self._kernels = layer_index, state, kernels
        self._score_scale = self.scale

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No output is quantised on the way: tokens past their prompts are written by other calls.

        Args:
            quant_key: What vLLM's compiler would fuse.

        Returns:
            False.
        """
        return False

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """vLLM's forward; a split batch is computed in its parts. Shapes are vLLM's."""
        if not isinstance(attn_metadata, HeadwiseMetadata):
            return super().forward(  # type: ignore[misc]
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        self._forward_stock(layer, query, key, value, kv_cache, attn_metadata, output)
        split = attn_metadata.split
        for window in split.partial_windows:
            window.queries[self._layer_index].copy_(query[window.tokens])
        if split.prompt_chunks or split.completions:
            with self._state.stopwatch:
                for chunk in split.prompt_chunks:
                    self._add_to_sums(query, key, kv_cache, chunk)
                for completion in split.completions:
                    self.pack(query, key, value, kv_cache, completion)
        if split.headwise is not None:
            self._forward_headwise(layer, query, split.headwise, output)
        return output

    def _forward_stock(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: HeadwiseMetadata,
        output: torch.Tensor,
    ) -> None:
        """vLLM's own call, on the tokens of the batch that are prompt or drop nothing."""
        if metadata.stock is None:
            return
        forward = super().forward  # type: ignore[misc]
        tokens = metadata.split.stock_tokens
        if tokens is None:
            forward(layer, query, key, value, kv_cache, metadata.stock, output)
            return
        part = output[tokens]
        forward(layer, query[tokens], key, value, kv_cache, metadata.stock, part)
        if not isinstance(tokens, slice):
            output[tokens] = part

    def _forward_headwise(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        batch: HeadwiseBatch,
        output: torch.Tensor,
    ) -> None:
        """Attention of the tokens past their prompts over the retained entries and the tail."""
        # [num_tokens, num_heads, head_size], or heads and their elements flattened in the output.
        by_head = (len(query), self.num_kv_heads, self.num_queries_per_kv, self.head_size)
        # Fails if it cannot be a view: what is written has to arrive.
        query, output = query.view(by_head), output.view(by_head)
        for call in batch.calls(self._table(batch), self.num_kv_heads, self.sinks):
            attended = call.take(output)
            self._attend(layer, call.take(query), batch, call, attended)
            call.put(attended, output)

    @abstractmethod
    def _table(self, batch: HeadwiseBatch) -> PageTable:
        """Pages and lengths of the batch's sequences in this layer."""

    @abstractmethod
    def _attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        batch: HeadwiseBatch,
        call: Call,
        output: torch.Tensor,
    ) -> None:
        """The backend's own call, over pages of single heads.

        Args:
            layer: vLLM's layer, with its scales.
            query: `[num_queries, group, head_size]`.
            batch: What bounds the sequences' lengths.
            call: Which sequences they are.
            output: Written in place, shaped as `query`; rows may be apart.
        """

    @abstractmethod
    def _read_keys(self, kv_cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Keys of whole pages in token order, `[num_kv_heads, n, head_size]`."""

    @abstractmethod
    def _read_values(self, kv_cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Values of whole pages in token order, `[num_kv_heads, n, head_size]`."""

    def _read(
        self, kv_cache: torch.Tensor, completion: Completion
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of a prompt, values at least of what competes, `[num_kv_heads, n, head_size]`."""
        key = self._read_keys(kv_cache, completion.pages)
        return key, self._read_values(kv_cache, completion.competing_pages)

    @abstractmethod
    def _move_slots(
        self, cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
    ) -> None:
        """Moves entries from slots to slots of a layer's cache, or of the memory of all layers."""

    def _at_hand(
        self, key: torch.Tensor, value: torch.Tensor, tokens: slice
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values of the step, `[num_kv_heads, n, head_size]`, if attention reads these."""
        return key[tokens].transpose(0, 1), value[tokens].transpose(0, 1)

    def _scored_queries(self, query: torch.Tensor) -> torch.Tensor:
        """Queries as scorers take them."""
        return query

    def _add_to_sums(
        self, query: torch.Tensor, key: torch.Tensor, kv_cache: torch.Tensor, chunk: PromptChunk
    ) -> None:
        """Adds what a chunk's queries attend to, for methods that need those of all tokens."""
        first = chunk.first_position == 0
        if first and (at_hand := self._at_hand(key, key, chunk.tokens)):
            key, _ = at_hand
        else:
            pages = head_pages(chunk.blocks, self.num_kv_heads)
            key = self._read_keys(kv_cache, pages)[:, : chunk.end]
        query = self._scored_queries(query)
        chunk.add(self._layer_index, query, key, self._score_scale, self.sinks)

    def pack(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        completion: Completion,
    ) -> None:
        """Selects what this layer retains of a prompt and moves it into the packed blocks.

        Scores are computed now, while queries and keys are at hand; the rest waits for the next
        step where it can, so that the first token does not wait for it.

        Args:
            query: Queries of the step, `[num_tokens, num_heads, head_size]`.
            key: Keys of the step, `[num_tokens, num_kv_heads, head_size]`.
            value: Values of the step, likewise.
            kv_cache: The layer's cache.
            completion: The prompt.
        """
        tokens = completion.prompt_tokens
        at_hand = self._at_hand(key, value, tokens) if tokens is not None else None
        num_competing = completion.cut.tail_start * kv_cache.shape[2]
        key, value = at_hand or self._read(kv_cache, completion)
        value = value[:, :num_competing]
        candidates = score_layer(
            *self._inputs(query, key, value, completion),
            completion.eviction,
            self._layer_index,
            self._kernels_of(completion),
            self.sinks,
        )
        if completion.kept is not None:
            candidates = completion.kept.keep(self._layer_index, candidates)
        if completion.later is None:
            self._finish(candidates, value, kv_cache, completion)
        else:
            completion.later.append(partial(self._finish_later, candidates, kv_cache, completion))

    def _finish_later(
        self, candidates: Candidates, kv_cache: torch.Tensor, completion: Completion
    ) -> None:
        """Chooses from the candidates of an earlier step; what else it needs is in the cache."""
        with self._state.later_stopwatch:
            value = None
            if not completion.is_pooled and needs_values(candidates, completion.eviction):
                value = self._read_values(kv_cache, completion.competing_pages)
            self._finish(candidates, value, kv_cache, completion)

    def _finish(
        self,
        candidates: Candidates,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        completion: Completion,
    ) -> None:
        """Chooses from this layer's candidates and moves what is retained."""
        if completion.is_pooled:
            self._finish_pool(kv_cache, completion)
            return
        retention = self._retain(candidates, value, completion)
        self._move(kv_cache, retention.retained, completion)
        offsets = retention.offsets + self._layer_index * retention.offsets[-1]
        self._state.store(completion.first_packed_block, offsets, self._layer_index)

    def _move(self, kv_cache: torch.Tensor, retained: torch.Tensor, completion: Completion) -> None:
        """Moves what this layer retains into the packed blocks."""
        num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
        num_competing = completion.cut.tail_start * block_size
        sources = retained_slots(
            retained, num_competing, completion.blocks, num_kv_heads, block_size, num_blocks
        )
        self._move_slots(kv_cache, sources, completion.slots)

    def _finish_pool(self, kv_cache: torch.Tensor, completion: Completion) -> None:
        """The last layer chooses for all and moves what they retain."""
        if self._layer_index < self._state.num_layers - 1:
            return
        assert completion.kept is not None
        retention = self._retain_pool(completion.kept.stacked, completion)
        moves = pool_moves(
            retention, completion.cut, completion.blocks, self._state.num_layers, kv_cache.shape
        )
        self._move_slots(all_layers(kv_cache), *moves)
        # [num_layers * num_kv_heads + 1] -> [num_layers, num_kv_heads + 1], ends shared
        by_layer = retention.offsets.unfold(0, self.num_kv_heads + 1, self.num_kv_heads)
        self._state.store(completion.first_packed_block, by_layer)

    def _retain_pool(self, candidates: Candidates, completion: Completion) -> Retention:
        """Chooses the entries of all layers from their stacked candidates."""
        size = (completion.cut.num_packed, completion.block_size)
        return retain_pool(candidates, *size, completion.eviction, self._kernels)

    def _retain(
        self, candidates: Candidates, value: torch.Tensor | None, completion: Completion
    ) -> Retention:
        """Chooses the entries of this layer."""
        size = (completion.cut.num_packed, completion.block_size)
        return retain_layer(
            candidates, value, self.output_projection, *size, completion.eviction, self._kernels
        )

    def _inputs(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, completion: Completion
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, OutputProjection | None, float]:
        """What the choice needs of this layer: queries of the window, keys, values, W_O, scale."""
        window = self._scored_queries(query[completion.window_tokens])
        if completion.earlier_queries is not None:
            window = torch.cat((completion.earlier_queries[self._layer_index], window))
        key = key[:, : completion.cut.position]
        return window, key, value, self.output_projection, self._score_scale

    def _kernels_of(self, completion: Completion) -> Kernels:
        """The kernels; where the prompt was scored chunk by chunk, its scores are there already."""
        if completion.sums is None:
            return self._kernels
        eviction, sums = completion.eviction, completion.sums[self._layer_index]
        scorer = scorer_of(sums, eviction.window)
        return replace(self._kernels, h2o_scores=scorer)


def refuse_layer(**unsupported: object) -> None:
    """Checks that a layer has none of the features that the one-head view cannot express.

    Args:
        **unsupported: What the layer has of each feature, by its name with underscores.

    Raises:
        ConfigError: If there is one.
    """
    for feature, present in unsupported.items():
        if present:
            raise ConfigError(
                f"kv_eviction does not support layers with {feature.replace('_', ' ')}; serve this "
                "model without --kv-eviction"
            )
