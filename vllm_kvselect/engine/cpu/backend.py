"""The CPU attention backend: vLLM's own kernel, called through the one-head view for decoding."""

from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import AttentionLayer, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from vllm_kvselect.engine.cpu.pages import PageCodec, one_head_view
from vllm_kvselect.engine.cpu.schedules import Schedules
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.engine.platforms import PLATFORMS
from vllm_kvselect.engine.step.builder import HeadwiseBuilder
from vllm_kvselect.engine.step.layer import HeadwiseImpl, refuse_layer
from vllm_kvselect.engine.view.memory import all_layers
from vllm_kvselect.engine.view.sequences import Call, HeadwiseBatch, OneHeadBatch
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.paging.page_table import PageTable


class HeadwiseCPUAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU backend with our builder and impl; the worker puts it in place."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """The size of a page: vLLM splits larger blocks into kernel blocks of it."""
        return [PLATFORMS["cpu"].page_size]

    @staticmethod
    def get_impl_cls() -> type["HeadwiseCPUAttentionImpl"]:
        """The impl of every full-attention layer."""
        return HeadwiseCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["HeadwiseCPUMetadataBuilder"]:
        """The builder of every group of layers."""
        return HeadwiseCPUMetadataBuilder


class HeadwiseCPUMetadataBuilder(HeadwiseBuilder, CPUAttentionMetadataBuilder):
    """Builds vLLM's metadata, split where requests read what is retained. Stock until `start`."""

    def _start_layers(
        self, layers: list[tuple[int, Any]], state: RetentionState, kernels: Kernels
    ) -> None:
        spec, cache_dtype = self.kv_cache_spec, self.kv_cache_dtype
        sizes = spec.block_size, spec.head_size
        codec = PageCodec(self.isa, self.dtype, *sizes, kernels, cache_dtype)
        # A drafter's batches have others, which come and go between those of two steps.
        of_target, of_drafter = (Schedules(self.isa, cache_dtype) for _ in range(2))
        for index, layer in layers:
            schedules = of_target if index < state.num_choosing else of_drafter
            layer.impl.start(index, layer, state, codec, schedules, kernels)


class HeadwiseCPUAttentionImpl(HeadwiseImpl, CPUAttentionBackendImpl):
    """vLLM's CPU attention, plus selection, packing and the one-head view."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.sliding_window != -1:  # drops nothing, stays vLLM's
            return
        refuse_layer(
            ALiBi=self.alibi_slopes is not None, a_logits_soft_cap=self.logits_soft_cap != 0
        )

    def start(
        self,
        layer_index: int,
        layer: Any,
        state: RetentionState,
        codec: PageCodec,
        schedules: Schedules,
        kernels: Kernels,
    ) -> None:
        """Connects the layer to its group."""
        self._connect(layer_index, layer, state, kernels)
        self._codec, self._schedules = codec, schedules
        self._keys_of_bytes = codec.numbers(layer._k_scale_float)
        self._values_of_bytes = codec.numbers(layer._v_scale_float)
        self._memory = all_layers(layer.kv_cache)
        self._key_pages, self._value_pages = one_head_view(self._memory).chunk(2, dim=2)
        if self.sinks is not None and self.sinks.dtype != torch.bfloat16:
            self.sinks = self.sinks.float()  # what else the kernel takes

    def read_keys(self, pages: torch.Tensor) -> torch.Tensor:
        """Keys of whole pages in their order, `[num_kv_heads, n, head_size]`."""
        return self._codec.read(self._memory, pages, self._keys_of_bytes)

    def read(self, pages: torch.Tensor, num_competing: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of whole pages and values of the first ones; see `DropLayer`."""
        first, numbers = pages[:, :num_competing].contiguous(), self._values_of_bytes
        return self.read_keys(pages), self._codec.read(self._memory, first, numbers, True)

    def move(
        self,
        pages: torch.Tensor,
        retained: torch.Tensor,
        num_competing: int,
        packed_blocks: torch.Tensor,
    ) -> None:
        """Moves what is retained within the memory of all layers; see `DropLayer`."""
        self._codec.move_retained(self._memory, pages, retained, num_competing, packed_blocks)

    def _table(self, batch: HeadwiseBatch) -> PageTable:
        layer = self.layer_index
        if batch.table is not None:
            return batch.by_layer[layer]
        only = slice(layer, layer + 1)
        table = batch.rows.page_table(self._state, self._codec.page_size, only)
        return PageTable(table.pages[0], table.seq_lens[0])

    def _attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        batch: OneHeadBatch,
        call: Call,
        output: torch.Tensor,
    ) -> None:
        attended = output.contiguous()  # as the kernel writes
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=self._key_pages,
            value_cache=self._value_pages,
            output=attended,
            query_start_loc=call.query_start_loc,
            seq_lens=call.table.seq_lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=call.table.pages,
            softcap=0.0,
            scheduler_metadata=self._schedules.of(self.layer_index, batch, call, query),
            s_aux=call.sinks,
            k_scale=layer._k_scale_float,
            v_scale=layer._v_scale_float,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        if attended is not output:
            output.copy_(attended)
