"""HeadwiseSpec: a full-attention KV cache that carries the eviction configuration."""

from dataclasses import dataclass
from typing import Self

from vllm.v1.kv_cache_interface import FullAttentionSpec, replace_as
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.block_manager import HeadwiseManager


@dataclass(frozen=True, kw_only=True)
class HeadwiseSpec(FullAttentionSpec):
    """Tells the scheduler's process what the workers will retain.

    Attributes:
        eviction: The configuration; the block manager plans with it.
    """

    eviction: EvictionConfig

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Merges the layers of a group as vLLM does, keeping the one configuration they share."""
        return replace_as(FullAttentionSpec.merge(specs), cls, eviction=specs[0].eviction)


# vLLM fills its registry only while it is still empty, so its own specs have to be in it first.
KVCacheSpecRegistry.check_kv_cache_spec_registry({})
KVCacheSpecRegistry.register(HeadwiseSpec, HeadwiseManager, FullAttentionSpec)
