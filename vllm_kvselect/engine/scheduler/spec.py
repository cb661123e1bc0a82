"""KV cache specs that carry the eviction configuration to the scheduler's process."""

from dataclasses import dataclass
from typing import Self

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    replace_as,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kvselect.config import ConfigError, EvictionConfig
from vllm_kvselect.engine.platforms import tokens_ahead
from vllm_kvselect.engine.scheduler.block_manager import (
    HeadwiseManager,
    StateManager,
    WindowManager,
)
from vllm_kvselect.engine.states.identity import StoreIdentity
from vllm_kvselect.planning.cuts import most_blocks

OTHER_OPTIONS = (
    "the nodes were started with different --kv-eviction and --kv-prefill options; give every node "
    "the same"
)
"""Why nodes are refused that do not plan alike."""


@dataclass(frozen=True, kw_only=True)
class HeadwiseSpec(FullAttentionSpec):
    """A full-attention KV cache: what the workers will retain by budget.

    Attributes:
        eviction: The configuration; the block manager plans with it.
        page_size: Entries of one head that lie together in a block; None for all of them.
        store: What the worker's files of contexts belong to; None if it keeps none.
    """

    eviction: EvictionConfig
    page_size: int | None = None
    store: StoreIdentity | None = None

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """What the largest request holds at once: all of its tokens only where nothing bounds it.

        vLLM asks when it checks that one of `--max-model-len` fits into the pool.
        """
        whole: int = super().max_memory_usage_bytes(vllm_config)
        most = most_blocks(
            vllm_config.model_config.max_model_len,
            self.block_size,
            self.eviction,
            tokens_ahead(vllm_config),
        )
        return min(whole, most * self.page_size_bytes)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Merges the layers of a group as vLLM does, keeping the one configuration they share.

        Raises:
            ConfigError: If they do not share one: each node is started with options of its own.
        """
        merged = FullAttentionSpec.merge(specs)  # vLLM asserts that they are full attention at all
        kinds = {getattr(spec, "eviction", None) for spec in specs}
        if kinds != {specs[0].eviction}:
            raise ConfigError(OTHER_OPTIONS)
        first = specs[0]
        ours = {"page_size": first.page_size, "store": first.store}
        return replace_as(merged, cls, eviction=first.eviction, **ours)


@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):
    """A sliding-window KV cache beside full-attention ones. It stays as vLLM manages it."""

    eviction: EvictionConfig


@dataclass(frozen=True, kw_only=True)
class StateSpec(MambaSpec):
    """States of layers without a KV cache of tokens, likewise: state space, linear attention."""

    eviction: EvictionConfig


Bystander = WindowSpec | StateSpec
"""Specs of layers that drop nothing, beside those that do."""


def with_eviction(
    spec: KVCacheSpec,
    eviction: EvictionConfig,
    page_size: int | None = None,
    store: StoreIdentity | None = None,
) -> KVCacheSpec:
    """A layer's spec with the configuration; kinds that eviction does not know stay as they are."""
    if type(spec) is FullAttentionSpec:
        ours = {"page_size": page_size, "store": store}
        return replace_as(spec, HeadwiseSpec, eviction=eviction, **ours)
    if type(spec) is SlidingWindowSpec:
        return replace_as(spec, WindowSpec, eviction=eviction)
    if type(spec) is MambaSpec:
        return replace_as(spec, StateSpec, eviction=eviction)
    return spec


# vLLM fills its registry only while it is still empty, so its own specs have to be in it first.
KVCacheSpecRegistry.check_kv_cache_spec_registry({})
KVCacheSpecRegistry.register(HeadwiseSpec, HeadwiseManager, FullAttentionSpec)
KVCacheSpecRegistry.register(WindowSpec, WindowManager, SlidingWindowSpec)
KVCacheSpecRegistry.register(StateSpec, StateManager, MambaSpec)
