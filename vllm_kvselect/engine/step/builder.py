"""What the backends' builders have in common; a layer's part is in `layer.py`.

Both classes are put in front of vLLM's own: `class Builder(HeadwiseBuilder, VllmsBuilder)`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_kvselect.engine.drop.due import DueDrops
from vllm_kvselect.engine.drop.request import RequestsOf
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.engine.scheduler.spec import HeadwiseSpec
from vllm_kvselect.engine.step.split import DraftSplitter, Seen, Splitter
from vllm_kvselect.engine.view.memory import refuse_scattered_layers
from vllm_kvselect.kernels.base import Kernels


class HeadwiseBuilder(ABC):
    """Builds vLLM's metadata, split where requests read what is retained. Stock until `start`."""

    kv_cache_spec: AttentionSpec
    layer_names: list[str]
    vllm_config: VllmConfig
    device: torch.device
    layers: list[Any]
    state: RetentionState
    due: DueDrops
    splitter_class: type[Splitter] = Splitter
    draft_splitter_class: type[Splitter] = DraftSplitter
    _splitter: Splitter | None = None

    def start(
        self,
        requests_of: RequestsOf,
        kernels: Kernels,
        of_drafter: Collection[str] = (),
        per_block: int = 1,
        keeps_numbers: bool = False,
    ) -> RetentionState:
        """Connects the layers of the group to their state; called once the cache is allocated.

        A drafter's layers are the last ones of the group.
        """
        spec = self.kv_cache_spec  # of a kernel block, where vLLM splits blocks into several
        assert isinstance(spec, HeadwiseSpec)
        by_name = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        targets = {name: by_name[name].kv_sharing_target_layer_name for name in self.layer_names}
        places = {name: i for i, name in enumerate(n for n in targets if targets[n] is None)}
        layers = [by_name[name] for name in places]
        sizes = len(layers[0].kv_cache), len(layers), spec.num_kv_heads
        page_size = spec.block_size if keeps_numbers else 0
        state = RetentionState(*sizes, self.device, len(of_drafter), per_block, page_size)
        assert {*[*places][state.num_choosing :]} == {*of_drafter}
        refuse_scattered_layers([layer.kv_cache for layer in layers])
        self.layers, self.state = layers, state
        owners = {name: target or name for name, target in targets.items()}
        by_place = [(places[owner], by_name[name]) for name, owner in owners.items()]
        self._start_layers(by_place, state, kernels)
        choosing = [layer.impl for layer in layers[: state.num_choosing]]
        self.due = DueDrops(choosing, state, spec.block_size)
        self._splitter = self.splitter(requests_of)
        return state

    def draft_for(self, target: "HeadwiseBuilder", requests_of: RequestsOf) -> None:
        """Connects a drafter's own builder to the state that its layers share with its target's."""
        spec = self.kv_cache_spec
        self._splitter = self.draft_splitter_class(target.state, requests_of, spec.block_size)

    def splitter(self, requests_of: RequestsOf) -> Splitter:
        """A splitter of the group's batches."""
        spec = self.kv_cache_spec
        assert isinstance(spec, HeadwiseSpec)
        return self.splitter_class(self.state, requests_of, spec.block_size)

    def take_queries(self) -> None:  # noqa: B027 (only graphs leave them elsewhere)
        """Takes what the last step left of queries, before cuts that are due look through them."""

    @abstractmethod
    def _start_layers(
        self, layers: list[tuple[int, Any]], state: RetentionState, kernels: Kernels
    ) -> None:
        """Connects the impls of layers to the group's state, each by the place of its cache."""

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
        if isinstance(split.seen, Seen):
            split.seen.keep()
        for index, part in enumerate(split.stock_parts):
            # FlashAttention's schedule lies in one buffer of the builder: the first part has it.
            fast = fast_build or index > 0
            part.metadata = self._build_stock(common_prefix_len, part.common, fast)
        return split

    def _build_stock(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool
    ) -> Any:
        """vLLM's own metadata of a batch, or of the part of it that its own call computes."""
        return super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
