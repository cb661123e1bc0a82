"""The CPU attention backend: vLLM's own kernel, called through the one-head view for decoding.

Attention comes first, then selection for the rows whose prompt is complete, then the tokens past
their prompts. A batch in which nobody drops anything takes vLLM's path from end to end.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_kvselect.compaction import gather_entries, head_pages
from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.batch import Completion, HeadwiseBatch, Split, Splitter
from vllm_kvselect.engine.cpu_pages import (
    PageCodec,
    all_layers,
    one_head_view,
    refuse_scattered_layers,
    write_entries,
)
from vllm_kvselect.engine.pool import Pool, move_entries
from vllm_kvselect.engine.prompts import PromptsOf
from vllm_kvselect.engine.spec import HeadwiseSpec
from vllm_kvselect.engine.state import RetentionState
from vllm_kvselect.engine.whole_prompt import PromptChunk, scorer_of
from vllm_kvselect.methods import METHODS, Retention, Twins, retain, retain_pool, score_layer
from vllm_kvselect.ranking import Candidates
from vllm_kvselect.scoring.value_norms import OutputProjection


class HeadwiseCPUAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU backend with our builder and impl; the worker puts it in place."""

    @staticmethod
    def get_impl_cls() -> type["HeadwiseCPUAttentionImpl"]:
        """The impl of every full-attention layer."""
        return HeadwiseCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["HeadwiseCPUMetadataBuilder"]:
        """The builder of every group of layers."""
        return HeadwiseCPUMetadataBuilder


@dataclass
class HeadwiseCPUMetadata:
    """A split batch, with vLLM's metadata for the part that its own call computes.

    Attributes:
        split: The batch's parts.
        stock: vLLM's metadata of `split.stock`, or None if that has no requests.
    """

    split: Split
    stock: CPUAttentionMetadata | None


class HeadwiseCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds vLLM's metadata, split where prompts end. Stock until `start` is called."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._splitter: Splitter | None = None

    def start(self, num_blocks: int, prompts_of: PromptsOf, twins: Twins) -> RetentionState:
        """Connects the layers of the group to their state; called once the cache is allocated.

        Args:
            num_blocks: Blocks of the KV cache.
            prompts_of: Gives the prompts of a batch.
            twins: Kernels to call in place of the references.

        Returns:
            The state of the group's layers.
        """
        spec = self.kv_cache_spec
        assert isinstance(spec, HeadwiseSpec)
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        max_num_seqs = self.vllm_config.scheduler_config.max_num_seqs
        state = RetentionState(num_blocks, len(layers), self.num_kv_heads, max_num_seqs)
        refuse_scattered_layers([layers[name].kv_cache for name in self.layer_names])
        codec = PageCodec(self.isa, spec.dtype, self.block_size, self.head_dim, twins)
        for index, name in enumerate(self.layer_names):
            layers[name].impl.start(index, self.isa, state, codec, twins)
        self._splitter = Splitter(
            spec.eviction.window,
            state,
            prompts_of,
            self.block_size,
            self.num_kv_heads,
            (self.num_heads, self.head_dim),
            self.dtype,
        )
        return state

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata | HeadwiseCPUMetadata:
        """vLLM's metadata where nothing is dropped, else the split batch."""
        split = self._splitter.split(common_attn_metadata) if self._splitter else None
        if split is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        stock = None
        if split.stock.num_reqs:
            stock = super().build(common_prefix_len, split.stock, fast_build)
        return HeadwiseCPUMetadata(split, stock)


class HeadwiseCPUAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, plus selection, packing and the one-head view.

    Attributes:
        output_projection: The layer's W_O, bound by the worker for methods that need it.
    """

    output_projection: OutputProjection | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.sliding_window != -1:  # drops nothing, stays vLLM's
            return
        unsupported = {
            "ALiBi": self.alibi_slopes is not None,
            "attention sinks": self.sinks is not None,
            "a logits soft cap": self.logits_soft_cap != 0,
            "a KV cache shared between layers": self.kv_sharing_target_layer_name is not None,
        }
        for feature, present in unsupported.items():
            if present:
                raise ConfigError(
                    f"kv_eviction does not support layers with {feature}; serve this model without "
                    "--kv-eviction"
                )

    def start(
        self,
        layer_index: int,
        isa: str,
        state: RetentionState,
        codec: PageCodec,
        twins: Twins,
    ) -> None:
        """Connects the layer to its group.

        Args:
            layer_index: The layer's place in the group.
            isa: Instruction set of the kernel.
            state: State of the group's layers.
            codec: Inner order of the pages.
            twins: Kernels to call in place of the references.
        """
        self._layer_index, self._isa, self._twins = layer_index, isa, twins
        self._state, self._codec = state, codec

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | HeadwiseCPUMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """vLLM's forward; a split batch is computed in its parts. Shapes are vLLM's."""
        if not isinstance(attn_metadata, HeadwiseCPUMetadata):
            return super().forward(
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
        for partial in split.partial_windows:
            partial.queries[self._layer_index].copy_(query[partial.tokens])
        if split.prompt_chunks or split.completions:
            started = time.perf_counter()
            for chunk in split.prompt_chunks:
                self._add_to_sums(query, key, kv_cache, chunk)
            for completion in split.completions:
                self._pack(query, key, value, kv_cache, completion)
            self._state.selection_seconds += time.perf_counter() - started
        if split.headwise is not None:
            self._forward_headwise(query, kv_cache, split.headwise, output)
        return output

    def _forward_stock(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: HeadwiseCPUMetadata,
        output: torch.Tensor,
    ) -> None:
        """vLLM's own call, on the tokens of the batch that are prompt or drop nothing."""
        if metadata.stock is None:
            return
        tokens = metadata.split.stock_tokens
        if tokens is None:
            super().forward(layer, query, key, value, kv_cache, metadata.stock, output)
            return
        part = output[tokens]
        super().forward(layer, query[tokens], key, value, kv_cache, metadata.stock, part)
        if not isinstance(tokens, slice):
            output[tokens] = part

    def _add_to_sums(
        self, query: torch.Tensor, key: torch.Tensor, kv_cache: torch.Tensor, chunk: PromptChunk
    ) -> None:
        """Adds what a chunk's queries attend to, for methods that need those of all tokens."""
        if chunk.first_position == 0:
            key = key[chunk.tokens].transpose(0, 1)
        else:
            pages = head_pages(chunk.blocks, self.num_kv_heads)
            key = self._codec.read_keys(kv_cache, pages)[:, : chunk.end]
        chunk.add(self._layer_index, query, key, self.scale)

    def _pack(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        completion: Completion,
    ) -> None:
        """Selects what this layer retains of a prompt and moves it into the packed blocks."""
        retention_plan = completion.plan
        if completion.prompt_tokens is not None:
            key = key[completion.prompt_tokens].transpose(0, 1)
            value = value[completion.prompt_tokens].transpose(0, 1)
        else:
            key = self._codec.read_keys(kv_cache, completion.pages)
            value = self._codec.read_values(kv_cache, completion.competing_pages)
        num_competing = retention_plan.tail_start * self._codec.block_size
        value = value[:, :num_competing]
        if completion.pool is not None:
            self._join_pool(completion.pool, query, key, value, kv_cache, completion)
            return
        retention = self._retain(query, key, value, completion)

        gather = self._twins.get(gather_entries, gather_entries)
        key, value = (
            gather(entries, retention.retained, num_competing) for entries in (key, value)
        )
        write_entries(kv_cache, key, value, completion.slots, self._isa)
        offsets = self._state.offsets[completion.first_packed_block, self._layer_index]
        offsets.copy_(retention.offsets + self._layer_index * retention.offsets[-1])

    def _join_pool(
        self,
        pool: Pool,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        completion: Completion,
    ) -> None:
        """Scores this layer; the last one chooses for all and packs them."""
        inputs = self._inputs(query, key, value, completion)
        candidates = score_layer(
            *inputs, completion.eviction, self._layer_index, self._twins_of(completion)
        )
        stacked = pool.join(self._layer_index, candidates)
        if stacked is None:
            return
        retention = self._retain_pool(stacked, completion)
        move_entries(
            kv_cache,
            retention,
            completion.plan,
            completion.blocks,
            self._state.num_layers,
            self._codec,
            self._isa,
        )
        # [num_layers * num_kv_heads + 1] -> [num_layers, num_kv_heads + 1], ends shared
        by_layer = retention.offsets.unfold(0, self.num_kv_heads + 1, self.num_kv_heads)
        self._state.offsets[completion.first_packed_block].copy_(by_layer)

    def _retain_pool(self, candidates: Candidates, completion: Completion) -> Retention:
        """Chooses the entries of all layers from their stacked candidates."""
        size = (completion.plan.num_packed, self._codec.block_size)
        return retain_pool(candidates, *size, completion.eviction, self._twins)

    def _retain(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, completion: Completion
    ) -> Retention:
        """Chooses the entries from keys and values `[num_kv_heads, num_tokens, head_size]`."""
        return retain(
            *self._inputs(query, key, value, completion),
            completion.plan.num_packed,
            self._codec.block_size,
            completion.eviction,
            self._layer_index,
            self._twins_of(completion),
        )

    def _inputs(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, completion: Completion
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, OutputProjection | None, float]:
        """What the choice needs of this layer: queries of the window, keys, values, W_O, scale."""
        window = query[completion.window_tokens]
        if completion.earlier_queries is not None:
            window = torch.cat((completion.earlier_queries[self._layer_index], window))
        key = key[:, : completion.num_prompt_tokens]
        return window, key, value, self.output_projection, self.scale

    def _twins_of(self, completion: Completion) -> Twins:
        """The twins; where the prompt was scored chunk by chunk, its scores are there already."""
        if completion.sums is None:
            return self._twins
        eviction, sums = completion.eviction, completion.sums[self._layer_index]
        scorer = scorer_of(sums, eviction.window)
        return {**self._twins, METHODS[eviction.method].scorer: scorer}

    def _forward_headwise(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: HeadwiseBatch,
        output: torch.Tensor,
    ) -> None:
        """Attention of the tokens past their prompts over the retained entries and the tail."""
        if batch.table is not None:
            pages, seq_lens = (part[self._layer_index] for part in batch.table)
        else:
            layer = slice(self._layer_index, self._layer_index + 1)
            table = batch.rows.page_table(self._state.offsets, self._codec.block_size, layer)
            pages, seq_lens = table.pages[0], table.seq_lens[0]
        # [num_tokens, num_heads, head_size] -> [num_tokens * num_kv_heads, group, head_size]
        group_shape = (-1, self.num_queries_per_kv, self.head_size)
        query = query.reshape(group_shape)[batch.queries]
        grouped_output = output.view(group_shape)
        part = grouped_output[batch.queries]
        key_pages, value_pages = one_head_view(all_layers(kv_cache)).chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=key_pages,
            value_cache=value_pages,
            output=part,
            query_start_loc=batch.query_start_loc,
            seq_lens=seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=pages,
            softcap=0.0,
            scheduler_metadata=self._schedule(batch, seq_lens, query.dtype),
            s_aux=None,
        )
        if not isinstance(batch.queries, slice):
            grouped_output[batch.queries] = part

    def _schedule(
        self, batch: HeadwiseBatch, seq_lens: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The kernel's work plan for sequences of these lengths."""
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=seq_lens.numel(),
            num_heads=self.num_queries_per_kv,
            num_kv_heads=1,
            head_dim=self.head_size,
            seq_lens=seq_lens,
            dtype=dtype,
            query_start_loc=batch.query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=self._isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
