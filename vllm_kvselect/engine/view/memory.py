"""The caches of all layers as one piece of memory: block `b` of layer `l` is a block of it."""

from collections.abc import Sequence

import torch

from vllm_kvselect.config import ConfigError


def all_layers(kv_cache: torch.Tensor) -> torch.Tensor:
    """Views the memory in which the cache of a layer lies, that of all layers, as one cache.

    Args:
        kv_cache: `[num_blocks, num_kv_heads, page_size, 2 * head_size]`, layout LBHNC.

    Returns:
        `[num_layers * num_blocks, num_kv_heads, page_size, 2 * head_size]`, the same memory: block
        `b` of layer `l` is block `l * num_blocks + b`.
    """
    block_bytes = kv_cache[0].numel() * kv_cache.element_size()
    num_blocks = kv_cache.untyped_storage().nbytes() // block_bytes
    return kv_cache.as_strided((num_blocks, *kv_cache.shape[1:]), kv_cache.stride(), 0)


def refuse_scattered_layers(kv_caches: Sequence[torch.Tensor]) -> None:
    """Checks that the layers' caches lie one after the other in one piece of memory.

    Raises:
        ConfigError: If they do not; one-head page ids count through all layers.
    """
    first = kv_caches[0]
    start = first.untyped_storage().data_ptr()
    for index, kv_cache in enumerate(kv_caches):
        is_next = kv_cache.data_ptr() == start + index * first.nbytes
        if not is_next or kv_cache.shape != first.shape or not kv_cache.is_contiguous():
            raise ConfigError(
                "kv_eviction needs the caches of all layers in one piece of memory, one after the "
                f"other, but that of layer {index} is elsewhere; serve without --kv-eviction"
            )
