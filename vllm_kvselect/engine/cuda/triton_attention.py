"""vLLM's Triton attention, called through the one-head view for decoding."""

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends import triton_attn
from vllm.v1.attention.backends.triton_attn import (
    NUM_PAR_SOFTMAX_SEGMENTS,
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_kvselect.engine.cuda.builder import CudaBackend, CudaMetadataBuilder
from vllm_kvselect.engine.cuda.layer import CudaImpl
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.engine.step.split import Split
from vllm_kvselect.engine.view.sequences import Call, HeadwiseBatch, OneHeadBatch
from vllm_kvselect.kernels.base import Kernels


class HeadwiseTritonAttentionBackend(CudaBackend, TritonAttentionBackend):
    """vLLM's Triton backend with our builder and impl; the worker puts it in place."""

    @staticmethod
    def get_impl_cls() -> type["HeadwiseTritonAttentionImpl"]:
        """The impl of every full-attention layer."""
        return HeadwiseTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["HeadwiseTritonAttentionMetadataBuilder"]:
        """The builder of every group of layers."""
        return HeadwiseTritonAttentionMetadataBuilder


class HeadwiseTritonAttentionMetadataBuilder(CudaMetadataBuilder, TritonAttentionMetadataBuilder):
    """Builds vLLM's metadata, split where prompts end."""

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """vLLM's, with lengths of 1 as there: at full length captures would take long."""
        metadata = self.build(0, common_attn_metadata)
        if not isinstance(metadata, Split):
            metadata.seq_lens.fill_(1)
            return metadata
        for part in metadata.parts:
            assert isinstance(part, HeadwiseBatch)
            part.rows.seq_lens.fill_(1)
        return metadata

    def _start_layers(
        self, layers: list[tuple[int, Any]], state: RetentionState, kernels: Kernels
    ) -> None:
        super()._start_layers(layers, state, kernels)
        for _, layer in layers:
            layer.impl.segments = self._segments(layer.num_kv_heads)

    def _segments(self, num_kv_heads: int) -> dict[str, Any]:
        """The buffers that vLLM's call merges parts of a sequence in, as those of single heads.

        `[num_tokens, num_heads, ...]` is the same memory as `[num_tokens * num_kv_heads, group,
        ...]`, and the launch grid, a program for each sequence and KV head, stays as large.
        """
        segments, group = NUM_PAR_SOFTMAX_SEGMENTS, self.num_heads_q // num_kv_heads
        head_size = self.softmax_segm_output.shape[-1]
        return {
            "seq_threshold_3D": self.seq_threshold_3D * num_kv_heads,
            "num_par_softmax_segments": segments,
            "softmax_segm_output": self.softmax_segm_output.view(-1, group, segments, head_size),
            "softmax_segm_max": self.softmax_segm_max.view(-1, group, segments),
            "softmax_segm_expsum": self.softmax_segm_expsum.view(-1, group, segments),
        }


class HeadwiseTritonAttentionImpl(CudaImpl, TritonAttentionImpl):
    """vLLM's Triton attention, plus selection, packing and the one-head view.

    Its call merges parts of a sequence in `segments`, as it names them.
    """

    segments: dict[str, Any]

    def _attend_pages(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        batch: OneHeadBatch,
        call: Call,
        output: torch.Tensor,
    ) -> None:
        # One head, so a scale for every sequence.
        scales = (len(call.table.seq_lens), 1)
        triton_attn.unified_attention(
            q=query,
            k=self._key_pages,
            v=self._value_pages,
            out=output,
            cu_seqlens_q=call.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            seqused_k=call.table.seq_lens,
            max_seqlen_k=batch.max_seq_len,
            softmax_scale=self.scale,
            causal=True,
            window_size=self.sliding_window,
            block_table=call.table.pages,
            softcap=self.logits_soft_cap,
            q_descale=layer._q_scale if query.dtype == self.fp8_dtype else None,
            k_descale=layer._k_scale.expand(scales),
            v_descale=layer._v_scale.expand(scales),
            kv_quant_mode=self._kv_quant_mode,
            sinks=call.sinks,
            use_td=self.use_td,
            **self.segments,
        )
