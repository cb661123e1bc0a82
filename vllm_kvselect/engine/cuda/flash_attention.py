"""FlashAttention, called through the one-head view for decoding."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionLayer
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vllm_kvselect.engine.cuda import any_order
from vllm_kvselect.engine.cuda.backends import refuse_large_view
from vllm_kvselect.engine.cuda.builder import CudaBackend, CudaMetadataBuilder
from vllm_kvselect.engine.cuda.layer import CudaImpl
from vllm_kvselect.engine.step.layer import refuse_layer
from vllm_kvselect.engine.view.sequences import Call, HeadwiseBatch, OneHeadBatch
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.paging.order import Sharing

_ENOUGH_QUERIES = 512
"""Of a sequence, those of all its heads counted: it is not split."""


class HeadwiseFlashAttentionBackend(CudaBackend, FlashAttentionBackend):
    """vLLM's FlashAttention backend with our builder and impl; the worker puts it in place."""

    @staticmethod
    def get_impl_cls() -> type["HeadwiseFlashAttentionImpl"]:
        """The impl of every full-attention layer."""
        return HeadwiseFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["HeadwiseFlashAttentionMetadataBuilder"]:
        """The builder of every group of layers."""
        return HeadwiseFlashAttentionMetadataBuilder


class HeadwiseFlashAttentionMetadataBuilder(CudaMetadataBuilder, FlashAttentionMetadataBuilder):
    """Builds vLLM's metadata, split where prompts end."""

    def _any_order(self, layers: Sequence[Any], kernels: Kernels) -> tuple[bool, Sharing | None]:
        impls = [layer.impl for layer in layers]
        if any(impl.vllm_flash_attn_version != 3 or impl.sinks is not None for impl in impls):
            return False, None
        first = layers[0]
        dtype = self.vllm_config.model_config.dtype
        quantized = first.impl.kv_cache_dtype.startswith("fp8")
        trial = any_order.Trial(
            self.num_heads_q // self.num_heads_kv,
            first.head_size,
            self.block_size,
            (current_platform.fp8_dtype() if quantized else dtype, dtype),
            self.device,
            first.impl.constants_of_calls(first, len(any_order.LENGTHS)),
            kernels.longest_first,
        )
        if not trial.takes_any_order():
            return False, None
        # Where there are no parts the operator would set the end of a schedule by a launch.
        return True, trial.sharing(self.max_num_splits) if self.max_num_splits > 1 else None

    def _max_num_splits(self, in_graph: bool) -> int:
        """As vLLM: a bound for what a graph holds, so that its buffers have one."""
        return int(self.max_num_splits) if in_graph else 0


class HeadwiseFlashAttentionImpl(CudaImpl, FlashAttentionImpl):
    """vLLM's FlashAttention, plus selection, packing and the one-head view."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Its kernel takes blocks of 128 tokens and tables cut to the batch's longest request.
        refuse_layer(heads_of_256_channels_on_Blackwell=self.fa4_hd256)

    def start(self, *args: Any, **kwargs: Any) -> None:
        """Connects the layer to its group; see `CudaImpl.start`."""
        super().start(*args, **kwargs)
        refuse_large_view(self.vllm_flash_attn_version, self._key_pages)

    def _attend_pages(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        batch: OneHeadBatch,
        call: Call,
        output: torch.Tensor,
    ) -> None:
        given = {
            "q": query,
            "k": self._key_pages,
            "v": self._value_pages,
            "out": output,
            "max_seqlen_q": batch.max_query_len,
            "seqused_k": call.table.seq_lens,
            "max_seqlen_k": batch.max_seq_len,
            "block_table": call.table.pages,
            "num_splits": self._num_splits(batch),
            "s_aux": call.sinks,
            **self.constants_of_calls(layer, len(call.table.seq_lens)),
        }
        orders = batch.orders
        if orders is None:
            flash_attn.flash_attn_varlen_func(**given, cu_seqlens_q=call.query_start_loc)
            return
        assert isinstance(batch, HeadwiseBatch)
        schedules = None if orders.schedules is None else orders.schedules.numbers
        given["scheduler_metadata"] = None if schedules is None else schedules[self.layer_index]
        sequences = orders.sequences[self.layer_index]
        any_order.attend(given, sequences, self._tables.num_queries(batch))

    def _num_splits(self, batch: OneHeadBatch) -> int:
        """Most parts of a sequence: 1 where queries alone keep the card busy.

        Left to itself, FlashAttention 3 thinks of one sequence of one head, and takes memory for
        the parts of all.
        """
        is_long = batch.max_query_len * self.num_queries_per_kv >= _ENOUGH_QUERIES
        return 1 if is_long else batch.num_splits

    def constants_of_calls(self, layer: AttentionLayer, num_sequences: int) -> dict[str, Any]:
        """What a call over pages of single heads is given in every step, by vLLM's names."""
        scales = (num_sequences, 1)  # one head, so one for every sequence
        return {
            "softmax_scale": self.scale,
            "causal": True,
            "fa_version": self.vllm_flash_attn_version,
            "q_descale": layer._q_scale.expand(scales) if self.supports_quant_query_input else None,
            "k_descale": layer._k_scale.expand(scales),
            "v_descale": layer._v_scale.expand(scales),
        }
