"""What the backends' builders have in common; a layer's part is in `headwise_impl.py`.

Both classes are put in front of vLLM's own: `class Builder(HeadwiseBuilder, VllmsBuilder)`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_kvselect.engine.batch import Split, Splitter
from vllm_kvselect.engine.memory import refuse_scattered_layers
from vllm_kvselect.engine.prompts import PromptsOf
from vllm_kvselect.engine.spec import HeadwiseSpec
from vllm_kvselect.engine.state import RetentionState
from vllm_kvselect.kernels.base import Kernels


@dataclass
class HeadwiseMetadata:
    """A split batch, with vLLM's metadata for the part that its own call computes.

    Attributes:
        split: The batch's parts.
        stock: vLLM's metadata of `split.stock`, or None if there is none.
    """

    split: Split
    stock: Any


class HeadwiseBuilder(ABC):
    """Builds vLLM's metadata, split where prompts end. Stock until `start` is called.

    Attributes:
        layers: The group's layers, once started.
        state: Their state.
    """

    kv_cache_spec: AttentionSpec
    layer_names: list[str]
    vllm_config: VllmConfig
    device: torch.device
    layers: list[Any]
    state: RetentionState
    splitter_class: type[Splitter] = Splitter
    _splitter: Splitter | None = None

    def start(self, num_blocks: int, prompts_of: PromptsOf, kernels: Kernels) -> RetentionState:
        """Connects the layers of the group to their state; called once the cache is allocated.

        Args:
            num_blocks: Blocks of the KV cache.
            prompts_of: Gives the prompts of a batch.
            kernels: What computes the parts of a choice.

        Returns:
            The state of the group's layers.
        """
        spec = self.kv_cache_spec
        assert isinstance(spec, HeadwiseSpec)
        by_name = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        layers = [by_name[name] for name in self.layer_names]
        max_num_seqs = self.vllm_config.scheduler_config.max_num_seqs
        state = RetentionState(
            num_blocks, len(layers), spec.num_kv_heads, max_num_seqs, self.device
        )
        refuse_scattered_layers([layer.kv_cache for layer in layers])
        self.layers, self.state = layers, state
        self._start_layers(layers, state, kernels)
        self._splitter = self.splitter(prompts_of)
        return state

    def splitter(self, prompts_of: PromptsOf) -> Splitter:
        """A splitter of the group's batches."""
        spec = self.kv_cache_spec
        assert isinstance(spec, HeadwiseSpec)
        return self.splitter_class(
            spec.eviction.window,
            self.state,
            prompts_of,
            spec.block_size,
            spec.num_kv_heads,
            (self.layers[0].num_heads, spec.head_size),
            self.vllm_config.model_config.dtype,
        )

    @abstractmethod
    def _start_layers(self, layers: list[Any], state: RetentionState, kernels: Kernels) -> None:
        """Connects the layers' impls to the group's state."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """vLLM's metadata where nothing is dropped, else the split batch."""
        split = self._splitter.split(common_attn_metadata) if self._splitter else None
        if split is None:
            return self._build_stock(common_prefix_len, common_attn_metadata, fast_build)
        stock = None
        if split.stock is not None:
            stock = self._build_stock(common_prefix_len, split.stock, fast_build)
        return HeadwiseMetadata(split, stock)

    def _build_stock(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool
    ) -> Any:
        """vLLM's own metadata of a batch, or of the part of it that its own call computes."""
        return super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
