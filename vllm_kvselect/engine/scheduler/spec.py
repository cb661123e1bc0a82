"""KV cache specs that carry the eviction configuration to the scheduler's process."""

from dataclasses import dataclass
from typing import Self

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    replace_as,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kvselect.config import ConfigError, EvictionConfig
from vllm_kvselect.engine.scheduler.block_manager import HeadwiseManager, WindowManager

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
    """

    eviction: EvictionConfig

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
        return replace_as(merged, cls, eviction=specs[0].eviction)


@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):
    """A sliding-window KV cache beside full-attention ones. It stays as vLLM manages it.

    Attributes:
        eviction: The configuration; it decides whose generated tokens are not hashed.
    """

    eviction: EvictionConfig


def with_eviction(spec: KVCacheSpec, eviction: EvictionConfig) -> KVCacheSpec:
    """A layer's spec with the configuration; kinds that eviction does not know stay as they are."""
    if type(spec) is FullAttentionSpec:
        return replace_as(spec, HeadwiseSpec, eviction=eviction)
    if type(spec) is SlidingWindowSpec:
        return replace_as(spec, WindowSpec, eviction=eviction)
    return spec


# vLLM fills its registry only while it is still empty, so its own specs have to be in it first.
KVCacheSpecRegistry.check_kv_cache_spec_registry({})
KVCacheSpecRegistry.register(HeadwiseSpec, HeadwiseManager, FullAttentionSpec)
KVCacheSpecRegistry.register(WindowSpec, WindowManager, SlidingWindowSpec)
