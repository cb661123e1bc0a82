"""What the CUDA backends' layers have in common: reading and moving entries, the one-head view."""

from abc import abstractmethod
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionLayer, AttentionType

from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.cuda.tables import HeadwiseTables
from vllm_kvselect.engine.cuda.xformers_attention import SplitKAttention
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.engine.step.layer import HeadwiseImpl, refuse_layer
from vllm_kvselect.engine.view.memory import all_layers
from vllm_kvselect.engine.view.sequences import Call, HeadwiseBatch, OneHeadBatch
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.paging.page_table import PageTable


def one_head_view(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views the memory of all layers as a paged cache with a single KV head.

    Args:
        kv_cache: The cache of one of the layers,
            `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, layout LBHNC.
        head_size: Elements per key and per value.

    Returns:
        Keys and values, `[num_layers * num_blocks * num_kv_heads, block_size, 1, head_size]` each,
        the same memory, with the strides that TMA wants.
    """
    pages = all_layers(kv_cache).flatten(0, 1).unsqueeze(2)
    key, value = pages.split(head_size, dim=-1)
    return canonicalize_singleton_dim_strides(key), canonicalize_singleton_dim_strides(value)


class CudaImpl(HeadwiseImpl):
    """Selection, packing and the one-head view, put in front of vLLM's impl of a backend.

    A step's entries are in the cache before `forward` is called. With an fp8 cache, what is scored
    is what attention reads: quantised keys and values, and the queries as they are handed over.
    """

    alibi_slopes: Any
    sliding_window: tuple[int, int]
    logits_soft_cap: float
    attn_type: str
    _split_k: SplitKAttention | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if tuple(self.sliding_window) != (-1, -1):  # drops nothing, stays vLLM's
            return
        refuse_layer(
            ALiBi=self.alibi_slopes is not None,
            a_logits_soft_cap=self.logits_soft_cap != 0,
            attention_other_than_a_decoder=self.attn_type != AttentionType.DECODER,
        )

    def start(
        self,
        layer_index: int,
        layer: Any,
        state: RetentionState,
        tables: HeadwiseTables,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        """Connects the layer to its group; called once the cache is allocated and weights loaded.

        Quantised keys and values are scored in `dtype`, the model's.
        """
        self._connect(layer_index, layer, state, kernels)
        self._tables, self._dtype = tables, dtype
        key, value = one_head_view(layer.kv_cache, self.head_size)
        if self._is_quantized:
            key, value = (part.view(current_platform.fp8_dtype()) for part in (key, value))
            if layer.query_quant is not None:
                self._score_scale *= layer._q_scale_float
            self._key_scale, self._value_scale = layer._k_scale_float, layer._v_scale_float
        self._key_pages, self._value_pages = key, value

    @property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Pages of all layers as kernels read them, and what their bytes stand for; see `Paged`."""
        pages = all_layers(self.kv_cache).flatten(0, 1)
        if not self._is_quantized:
            return pages, None
        numbers = torch.arange(256, dtype=torch.uint8, device=pages.device)
        numbers = numbers.view(current_platform.fp8_dtype()).to(self._dtype)
        codes = torch.stack((numbers * self._key_scale, numbers * self._value_scale))
        return pages.view(torch.uint8), codes

    def take_xformers(self) -> None:
        """Takes xformers' kernel for the decode call; called once the layer is started.

        Raises:
            ConfigError: If the layer has attention sinks, of which that kernel knows nothing.
        """
        if self.sinks is not None:
            raise ConfigError(
                "xformers does not support layers with attention sinks; leave decode_attention out"
            )
        self._split_k = SplitKAttention(self._key_pages, self._value_pages, self.scale)

    def _table(self, batch: HeadwiseBatch) -> PageTable:
        again = self.kv_sharing_target_layer_name is not None
        return self._tables.of_layer(self.layer_index, batch, again)

    def _attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        batch: OneHeadBatch,
        call: Call,
        output: torch.Tensor,
    ) -> None:
        if self._split_k is not None and batch.max_query_len == 1:
            self._split_k(query, call.table, batch.max_seq_len, output)
        else:
            self._attend_pages(layer, query, batch, call, output)

    @abstractmethod
    def _attend_pages(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        batch: OneHeadBatch,
        call: Call,
        output: torch.Tensor,
    ) -> None:
        """vLLM's call of the backend; arguments as in `_attend`."""

    def _scored_queries(self, query: torch.Tensor) -> torch.Tensor:
        return query.to(self._dtype)

    def read_keys(self, pages: torch.Tensor) -> torch.Tensor:
        """Keys of whole pages in their order, `[num_kv_heads, n, head_size]`."""
        return self.read(pages, 0)[0]

    def read(self, pages: torch.Tensor, num_competing: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole pages, which stand side by side; see `DropLayer`."""
        memory = all_layers(self.kv_cache)
        read = memory.flatten(0, 1).index_select(0, pages.flatten())
        key, value = read.view(len(pages), -1, memory.shape[-1]).split(self.head_size, dim=-1)
        if not self._is_quantized:
            return key, value
        key, value = (
            part.view(current_platform.fp8_dtype()).to(self._dtype) for part in (key, value)
        )
        return key.mul_(self._key_scale), value.mul_(self._value_scale)

    def move(
        self,
        pages: torch.Tensor,
        retained: torch.Tensor,
        num_competing: int,
        packed_blocks: torch.Tensor,
    ) -> None:
        """Moves what is retained within the memory of all layers; see `DropLayer`."""
        memory = all_layers(self.kv_cache)
        self.kernels.move_retained(memory, pages, retained, num_competing, packed_blocks)
