"""Which attention backend serves a model: the first of those with a one-head view that takes it."""

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.log import logger
from vllm_kvselect.engine.platforms import PLATFORMS

_MOST_ELEMENTS = 2**31
"""Elements of a cache that FlashAttention 4 is known to address through the one-head view."""


def choose_backend(vllm_config: VllmConfig) -> AttentionBackendEnum:
    """The first of our backends that takes the model here; the first of all if none does."""
    ours = [*PLATFORMS["cuda"].backends]
    return next((backend for backend in ours if not reasons_against(backend, vllm_config)), ours[0])


def backend_problems(vllm_config: VllmConfig) -> list[str]:
    """Says why none of our backends takes a model, where the user names none."""
    if vllm_config.attention_config.backend is not None:  # vLLM says what it does not take
        return []
    against = {
        backend.name: reasons_against(backend, vllm_config)
        for backend in PLATFORMS["cuda"].backends
    }
    if not all(against.values()):
        return []
    reasons = ", ".join(f"{name} ({'; '.join(found)})" for name, found in against.items())
    return [
        f"no attention backend with a view of single heads takes this model here: {reasons}; serve "
        "it without --kv-eviction"
    ]


def reasons_against(backend: AttentionBackendEnum, vllm_config: VllmConfig) -> list[str]:
    """What stands against a backend, by vLLM's own checks and for its one-head view."""
    capability = current_platform.get_device_capability()
    assert capability is not None
    asked = _selector_config(vllm_config)
    try:
        found: list[str] = backend.get_class().validate_configuration(
            device_capability=capability, **asked._asdict()
        )
    except (ImportError, OSError) as error:
        found = [f"{type(error).__name__}: {error}"]
    if backend is AttentionBackendEnum.FLASH_ATTN:
        # As vLLM's layers ask, which know no block size yet.
        version = flash_attn.get_flash_attn_version(
            head_size=asked.head_size, has_sinks=asked.has_sink, supports_fa4_hd256=True
        )
        if version == 4:
            found.append("FlashAttention 4 is not shown to address a whole cache as one head")
    return found


def refuse_large_view(fa_version: int | None, key_pages: torch.Tensor) -> None:
    """Checks that a kernel can address the memory of all layers as one cache.

    FlashAttention 2 and 3 and vLLM's Triton kernel count in 64 bits.

    Args:
        fa_version: FlashAttention's.
        key_pages: Keys of all layers, `[num_pages, block_size, 1, head_size]`.

    Raises:
        ConfigError: If it is not known to.
    """
    num_elements = key_pages.shape[0] * key_pages.stride(0)
    if fa_version == 4 and num_elements > _MOST_ELEMENTS:
        raise ConfigError(
            f"FlashAttention 4 is not shown to address the {num_elements} elements of this KV "
            "cache as one head; choose --attention-backend TRITON_ATTN, or lower "
            "--kv-cache-memory-bytes"
        )


def log_backend(vllm_config: VllmConfig) -> None:
    """Says which backend stands in for which."""
    taken, preferred = vllm_config.attention_config.backend, _preferred(vllm_config)
    instead = "" if preferred in (None, taken.name) else f", where vLLM would take {preferred}"
    logger.info(
        "KV eviction's one-head view stands in for attention backend %s%s", taken.name, instead
    )


def _preferred(vllm_config: VllmConfig) -> str | None:
    """The backend that vLLM would take if none was named, or None where that cannot be told."""
    capability = current_platform.get_device_capability()
    valid_backends = getattr(current_platform, "get_valid_backends", None)
    if valid_backends is None:
        return None
    try:
        candidates, _ = valid_backends(capability, _selector_config(vllm_config))
    except TypeError:  # another release's signature
        return None
    return candidates[0].backend.name if candidates else None


def _selector_config(vllm_config: VllmConfig) -> AttentionSelectorConfig:
    """What vLLM's selector asks of backends for the layers with full attention."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    return AttentionSelectorConfig(
        head_size=model.get_head_size(),
        dtype=model.dtype,
        kv_cache_dtype=cache.cache_dtype,
        block_size=cache.block_size if cache.user_specified_block_size else None,
        has_sink=_may_have_sinks(model.hf_text_config),
        use_mm_prefix=model.is_mm_prefix_lm,
        use_batch_invariant=envs.VLLM_BATCH_INVARIANT,
        use_pcp=parallel.prefill_context_parallel_size > 1,
        use_dcp=parallel.decode_context_parallel_size > 1,
    )


def _may_have_sinks(hf_config: object) -> bool:
    """Whether layers may have attention sinks, which most models say in a field of that name.

    Layers are not loaded yet. A model that has none is served by a backend that takes them, too.
    """
    fields = vars(hf_config)
    kind = str(fields.get("model_type"))
    if kind == "gpt_oss" or (kind.startswith("granite") and fields.get("layer_types")):
        return True
    return any("sink" in name and value for name, value in fields.items())
