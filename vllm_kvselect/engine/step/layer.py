"""What the backends' layers have in common: attention, and queries that are shown.

A batch in which nobody drops anything takes vLLM's path from end to end.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionLayer

from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.engine.sparse.worker_segments import SparseBatch, joined
from vllm_kvselect.engine.step.split import Split
from vllm_kvselect.engine.view.sequences import Call, HeadwiseBatch, OneHeadBatch
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.paging.compaction import head_pages
from vllm_kvselect.paging.page_table import PageTable
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.rotation import Rotation
from vllm_kvselect.scoring.value_norms import OutputProjection


class HeadwiseImpl(ABC):
    """A layer: vLLM's attention and the one-head view, and what a choice reads and moves.

    Attributes:
        output_projection: The layer's W_O, bound by the worker for methods that need it.
        rotation: How positions are applied to its queries and keys, likewise.
        probe: Its calibrated probe, `[num_features, num_kv_heads]`, likewise.
        layer_index: The layer's place in its group.
        kv_cache: Its cache.
        kernels: What computes the parts of a choice.
        kv_sharing_target_layer_name: The layer whose cache it reads in place of one of its own, or
            None. What that one retains it reads, and adds nothing to the choice.
    """

    num_kv_heads: int
    num_queries_per_kv: int
    head_size: int
    scale: float
    sinks: torch.Tensor | None
    kv_cache_dtype: str
    output_projection: OutputProjection | None = None
    rotation: Rotation | None = None
    probe: torch.Tensor | None = None
    layer_index: int
    kv_cache: torch.Tensor
    kernels: Kernels
    kv_sharing_target_layer_name: str | None

    def _connect(
        self, layer_index: int, layer: Any, state: RetentionState, kernels: Kernels
    ) -> None:
        """Connects the layer to its group, at its place or that of the layer whose cache it reads.

        Raises:
            ConfigError: If the cache is quantised with scales per head.
        """
        self.layer_index, self.kv_cache, self.kernels = layer_index, layer.kv_cache, kernels
        self._state = state
        is_own = self.kv_sharing_target_layer_name is None
        self._shows_queries = is_own and layer_index < state.num_choosing
        self._score_scale = self.scale
        self._is_quantized = self.kv_cache_dtype.startswith("fp8")  # others are refused
        if self._is_quantized and (layer._k_scale.numel() != 1 or layer._v_scale.numel() != 1):
            raise ConfigError(
                "kv_eviction does not support an fp8 KV cache with scales per head; serve this "
                "checkpoint with --kv-cache-dtype bfloat16"
            )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No output is quantised on the way: tokens past their cuts are written by other calls."""
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
        split, forward = attn_metadata, super().forward  # type: ignore[misc]
        if not isinstance(split, Split):
            scales = output_scale, output_block_scale
            return forward(layer, query, key, value, kv_cache, split, output, *scales)
        if split.seen is not None and self._shows_queries:
            split.seen.see(self.layer_index, self._scored_queries(query))
        for part in split.parts_in(self.layer_index):
            if isinstance(part, HeadwiseBatch):
                self._forward_sequences(layer, query, part, self._table(part), output)
            elif isinstance(part, SparseBatch):
                table = self._sparse_table(query, key, part)
                self._forward_sequences(layer, query, part, table, output)
            elif part.tokens is None:
                forward(layer, query, key, value, kv_cache, part.metadata, output)
            else:
                own, is_view = query[part.tokens], isinstance(part.tokens, slice)
                size = len(own), *output.shape[1:]
                attended = output[part.tokens] if is_view else output.new_empty(size)
                forward(layer, own, key, value, kv_cache, part.metadata, attended)
                if not is_view:
                    output[part.tokens] = attended
        return output

    def _sparse_table(
        self, query: torch.Tensor, key: torch.Tensor, batch: SparseBatch
    ) -> PageTable:
        """Pages that the sparse segments read in this layer."""
        with self._state.estimate_stopwatch:
            tables = []
            for row in batch.rows:
                asked = self._scored_queries(query[row.tokens])
                keys = self._at_hand(key, row.chunk)
                tables.append(row.table(asked, keys, self._score_scale, self))
            return joined(tables)

    def _forward_sequences(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        batch: OneHeadBatch,
        table: PageTable,
        output: torch.Tensor,
    ) -> None:
        """Attention of tokens over the pages of single heads."""
        # [num_tokens, num_heads, head_size], or heads and their elements flattened in the output.
        by_head = (len(query), self.num_kv_heads, self.num_queries_per_kv, self.head_size)
        # Fails if it cannot be a view: what is written has to arrive.
        query, output = query.view(by_head), output.view(by_head)
        for call in batch.calls(table, self.num_kv_heads, self.sinks):
            own = call.take(query)
            attended = call.room(own, output)
            self._attend(layer, own, batch, call, attended)
            call.put(attended, output)

    @abstractmethod
    def _table(self, batch: HeadwiseBatch) -> PageTable:
        """Pages and lengths of the batch's sequences in this layer."""

    @abstractmethod
    def _attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        batch: OneHeadBatch,
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
    def read_keys(self, pages: torch.Tensor) -> torch.Tensor:
        """Keys of whole pages in their order, `[num_kv_heads, n, head_size]`.

        Args:
            pages: Page ids of each head in the memory of all layers, `[num_kv_heads, m]` int64.
        """

    @abstractmethod
    def read(self, pages: torch.Tensor, num_competing: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of whole pages and values at least of the first ones; see `DropLayer`."""

    @property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Pages of all layers as kernels read them, and what their bytes stand for; see `Paged`."""
        return None

    @abstractmethod
    def move(
        self,
        pages: torch.Tensor,
        retained: torch.Tensor,
        num_competing: int,
        packed_blocks: torch.Tensor,
    ) -> None:
        """Moves what is retained within the memory of all layers; see `DropLayer`."""

    def pages_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Pages of blocks in this layer, `[num_kv_heads, n]` int64, for blocks `[n]` int64."""
        return head_pages(blocks + self.layer_index * len(self.kv_cache), self.num_kv_heads)

    def _at_hand(self, key: torch.Tensor, tokens: slice) -> torch.Tensor | None:
        """Keys of the step, `[num_kv_heads, n, head_size]`, if attention reads these.

        It does not where the cache is quantised: what is scored is what attention reads.
        """
        return None if self._is_quantized else key[tokens].transpose(0, 1)

    def _scored_queries(self, query: torch.Tensor) -> torch.Tensor:
        """Queries as scorers take them."""
        return query

    def inputs(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> ScoringInputs:
        """What scorers may read of this layer."""
        return ScoringInputs(
            query,
            key,
            value,
            self._score_scale,
            self.output_projection,
            self.sinks,
            self.layer_index,
            self.rotation,
            probe=self.probe,
        )


def refuse_layer(**unsupported: object) -> None:
    """Checks that a layer has none of the features that the one-head view cannot express.

    They are named with underscores.

    Raises:
        ConfigError: If there is one.
    """
    for feature, present in unsupported.items():
        if present:
            raise ConfigError(
                f"kv_eviction does not support layers with {feature.replace('_', ' ')}; serve this "
                "model without --kv-eviction"
            )
