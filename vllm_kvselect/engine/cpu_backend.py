"""The CPU attention backend: vLLM's own kernel, called through the one-head view for decoding.

Attention comes first, then selection for the rows whose prompt is complete, then the tokens past
their prompts. A batch in which nobody drops anything takes vLLM's path from end to end.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
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

from vllm_kvselect.compaction import packed_slots
from vllm_kvselect.config import ConfigError, EvictionConfig
from vllm_kvselect.engine.batch import (
    Completion,
    HeadwiseBatch,
    Rows,
    Tokens,
    headwise_batch,
    start_loc,
    token_indices,
)
from vllm_kvselect.engine.cpu_pages import PageCodec, one_head_view, write_entries
from vllm_kvselect.engine.spec import HeadwiseSpec
from vllm_kvselect.engine.state import RetentionState
from vllm_kvselect.methods import Retention, retain
from vllm_kvselect.retention import plan

PromptLens = Callable[[CommonAttentionMetadata], np.ndarray]
"""Prompt lengths `[num_reqs]` of a batch's rows, from the model runner that holds them."""


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
class PartialWindow:
    """A chunk that ends inside a prompt's observation window: its queries there are kept.

    Attributes:
        queries: Where they go, `[num_layers, n, num_heads, head_size]`.
        tokens: Which tokens of the batch they are.
    """

    queries: torch.Tensor
    tokens: slice


@dataclass
class HeadwiseCPUMetadata:
    """A batch in which something is dropped, or about to be.

    Attributes:
        stock: Metadata of the tokens that vLLM's own call computes, or None.
        stock_tokens: Those tokens; None stands for the whole batch as it is.
        completions: Rows to select and pack after that call.
        partial_windows: Queries to keep for a later chunk.
        headwise: Tokens that read retained entries, computed last, or None.
    """

    stock: CPUAttentionMetadata | None
    stock_tokens: Tokens | None
    completions: list[Completion]
    partial_windows: list[PartialWindow]
    headwise: HeadwiseBatch | None


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
        self._state: RetentionState | None = None
        self._prompt_lens: PromptLens | None = None

    def start(self, num_blocks: int, prompt_lens: PromptLens) -> RetentionState:
        """Connects the layers of the group to their state; called once the cache is allocated.

        Args:
            num_blocks: Blocks of the KV cache.
            prompt_lens: Gives the prompt lengths of a batch.

        Returns:
            The state of the group's layers.
        """
        assert isinstance(self.kv_cache_spec, HeadwiseSpec)
        self._eviction = self.kv_cache_spec.eviction
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        self._state = RetentionState(
            num_blocks,
            len(layers),
            self.num_kv_heads,
            self.vllm_config.scheduler_config.max_num_seqs,
        )
        self._prompt_lens = prompt_lens
        codec = PageCodec(self.isa, self.kv_cache_spec.dtype, self.block_size, self.head_dim)
        for index, name in enumerate(self.layer_names):
            layers[name].impl.start(index, self.isa, self._eviction, self._state, codec)
        return self._state

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata | HeadwiseCPUMetadata:
        """vLLM's metadata where nothing is dropped, else the split batch."""
        if self._state is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        rows = self._rows(common_attn_metadata)
        block_table = common_attn_metadata.block_table_tensor
        partial_windows = self._partial_windows(rows, block_table)
        completing = rows.completing
        settled = np.flatnonzero(rows.stock_lens < rows.query_lens)
        if not completing.any() and not settled.size and not partial_windows:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

        metadata = HeadwiseCPUMetadata(
            stock=None,
            stock_tokens=None,
            completions=[
                self._completion(rows, row, block_table) for row in np.flatnonzero(completing)
            ],
            partial_windows=partial_windows,
            headwise=None,
        )
        if settled.size:
            metadata.headwise = headwise_batch(rows, settled, block_table, self.num_kv_heads)
            if not completing[settled].any():
                metadata.headwise.table = metadata.headwise.page_table(
                    self._state.offsets, self.block_size
                )
            common_attn_metadata = self._stock_part(rows, common_attn_metadata, metadata)
        if common_attn_metadata.num_reqs:
            metadata.stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return metadata

    def _rows(self, common: CommonAttentionMetadata) -> Rows:
        query_start = common.query_start_loc_cpu.numpy()
        seq_lens = common.seq_lens.numpy().astype(np.int64)
        prompt_lens = self._prompt_lens(common).astype(np.int64)
        plans = [plan(int(n), self.block_size, self._eviction) for n in prompt_lens]
        planned = np.array([p is not None for p in plans], dtype=bool)
        return Rows(
            query_start=query_start[:-1].astype(np.int64),
            query_lens=np.diff(query_start).astype(np.int64),
            seq_lens=seq_lens,
            prompt_lens=np.where(planned, prompt_lens, seq_lens),
            plans=plans,
        )

    def _stock_part(
        self, rows: Rows, common: CommonAttentionMetadata, metadata: HeadwiseCPUMetadata
    ) -> CommonAttentionMetadata:
        """Cuts the batch down to the tokens that vLLM's own call computes."""
        lens = rows.stock_lens
        kept = np.flatnonzero(lens)
        metadata.stock_tokens = token_indices(rows.query_start[kept], lens[kept])
        seq_lens = np.minimum(rows.seq_lens, rows.prompt_lens)[kept].astype(np.int32)
        locations = start_loc(lens[kept])
        return common.replace(
            query_start_loc=locations,
            query_start_loc_cpu=locations,
            seq_lens=torch.from_numpy(seq_lens),
            num_reqs=len(kept),
            num_actual_tokens=int(lens.sum()),
            max_query_len=int(lens.max()),
            max_seq_len=int(seq_lens.max(initial=0)),
            block_table_tensor=common.block_table_tensor[torch.from_numpy(kept)],
        )

    def _completion(self, rows: Rows, row: int, block_table: torch.Tensor) -> Completion:
        retention_plan, num_prompt_tokens = rows.plans[row], int(rows.prompt_lens[row])
        blocks = block_table[row, : -(-num_prompt_tokens // self.block_size)].to(torch.int64)
        first_packed_block = int(blocks[retention_plan.first_packed])
        start, end = rows.query_start[row], rows.query_start[row] + rows.stock_lens[row]
        num_earlier = int(rows.num_computed[row]) - (num_prompt_tokens - self._eviction.window)
        window = self._state.window(first_packed_block, num_earlier)
        self._state.close_window(first_packed_block)
        return Completion(
            plan=retention_plan,
            blocks=blocks,
            first_packed_block=first_packed_block,
            num_prompt_tokens=num_prompt_tokens,
            window_tokens=slice(int(max(start, end - self._eviction.window)), int(end)),
            earlier_queries=window.queries[:, :num_earlier] if window else None,
        )

    def _partial_windows(self, rows: Rows, block_table: torch.Tensor) -> list[PartialWindow]:
        """Chunks that end after the window's first token and before the prompt's last."""
        window_start = rows.prompt_lens - self._eviction.window
        partial = (rows.seq_lens > window_start) & (rows.seq_lens < rows.prompt_lens)
        return [
            self._partial_window(rows, row, int(window_start[row]), block_table)
            for row in np.flatnonzero(partial)
        ]

    def _partial_window(
        self, rows: Rows, row: int, window_start: int, block_table: torch.Tensor
    ) -> PartialWindow:
        first_packed_block = int(block_table[row, rows.plans[row].first_packed])
        num_computed, seq_len = int(rows.num_computed[row]), int(rows.seq_lens[row])
        if num_computed <= window_start:
            shape = (len(self.layer_names), self._eviction.window, self.num_heads, self.head_dim)
            self._state.open_window(first_packed_block, shape, self.dtype)
        first = max(0, num_computed - window_start)
        window = self._state.window(first_packed_block, first)
        end = int(rows.query_start[row] + rows.query_lens[row])
        num_new = seq_len - window_start - first
        window.num_filled = first + num_new
        return PartialWindow(window.queries[:, first : first + num_new], slice(end - num_new, end))


class HeadwiseCPUAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, plus selection, packing and the one-head view."""

    output_projection: torch.Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        unsupported = {
            "ALiBi": self.alibi_slopes is not None,
            "attention sinks": self.sinks is not None,
            "a sliding window": self.sliding_window != -1,
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
        eviction: EvictionConfig,
        state: RetentionState,
        codec: PageCodec,
    ) -> None:
        """Connects the layer to its group.

        Args:
            layer_index: The layer's place in the group.
            isa: Instruction set of the kernel.
            eviction: The configuration.
            state: State of the group's layers.
            codec: Inner order of the pages.
        """
        self._layer_index, self._isa = layer_index, isa
        self._eviction, self._state, self._codec = eviction, state, codec

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
        for partial in attn_metadata.partial_windows:
            partial.queries[self._layer_index].copy_(query[partial.tokens])
        if attn_metadata.completions:
            started = time.perf_counter()
            for completion in attn_metadata.completions:
                self._pack(query, kv_cache, completion)
            self._state.selection_seconds += time.perf_counter() - started
        if attn_metadata.headwise is not None:
            self._forward_headwise(query, kv_cache, attn_metadata.headwise, output)
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
        tokens = metadata.stock_tokens
        if tokens is None:
            super().forward(layer, query, key, value, kv_cache, metadata.stock, output)
            return
        part = output[tokens]
        super().forward(layer, query[tokens], key, value, kv_cache, metadata.stock, part)
        if not isinstance(tokens, slice):
            output[tokens] = part

    def _pack(self, query: torch.Tensor, kv_cache: torch.Tensor, completion: Completion) -> None:
        """Selects what this layer retains of a prompt and moves it into the packed blocks."""
        num_kv_heads, block_size = kv_cache.shape[1:3]
        retention_plan = completion.plan
        key = self._codec.read_keys(kv_cache, completion.blocks)
        value = self._codec.read_values(kv_cache, completion.blocks[: retention_plan.tail_start])
        retention = self._retain(query, key, value, completion)

        num_tokens = value.shape[1]
        head, token = retention.retained // num_tokens, retention.retained % num_tokens
        packed = completion.blocks[retention_plan.first_packed : retention_plan.tail_start]
        slots = packed_slots(packed, num_kv_heads, block_size)
        write_entries(kv_cache, key[head, token], value[head, token], slots, self._isa)
        offsets = self._state.offsets[completion.first_packed_block, self._layer_index]
        offsets.copy_(retention.offsets)
        if self._layer_index == 0:
            self._state.num_evicted += 1

    def _retain(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, completion: Completion
    ) -> Retention:
        """Chooses the entries; `key` and `value` are whole blocks of the prompt in token order."""
        window = query[completion.window_tokens]
        if completion.earlier_queries is not None:
            window = torch.cat((completion.earlier_queries[self._layer_index], window))
        return retain(
            window,
            key[:, : completion.num_prompt_tokens],
            value,
            self.output_projection,
            self.scale,
            completion.plan.num_packed,
            self._codec.block_size,
            self._eviction,
        )

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
            table = batch.page_table(self._state.offsets[:, layer], self._codec.block_size)
            pages, seq_lens = table.pages[0], table.seq_lens[0]
        # [num_tokens, num_heads, head_size] -> [num_tokens * num_kv_heads, group, head_size]
        group_shape = (-1, self.num_queries_per_kv, self.head_size)
        query = query.reshape(group_shape)[batch.queries]
        grouped_output = output.view(group_shape)
        part = grouped_output[batch.queries]
        key_pages, value_pages = one_head_view(kv_cache).chunk(2, dim=2)
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
