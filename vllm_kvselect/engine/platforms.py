"""One record a platform: the workers, backends and limits that differ between them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

_ENGINE = "vllm_kvselect.engine"


@dataclass(frozen=True)
class Platform:
    """What differs between platforms.

    Attributes:
        stock_worker: vLLM's worker class.
        worker: Ours.
        backends: Our attention backend for each of vLLM's that it can stand in for; the first is
            taken where the user names none.
        block_multiple: Tokens by which a block size must be divisible.
        page_size: Entries per page, whatever the block size is.
        page_is_block: Whether a page has as many entries as a block has tokens instead, except in
            hybrids: their blocks have room for a state, and so for hundreds of tokens.
        default_block_size: Block size where the user names none; None leaves it to vLLM.
        quantized_cache_dtypes: Values of `--kv-cache-dtype` beside the model's own type.
    """

    stock_worker: str
    worker: str
    backends: Mapping[AttentionBackendEnum, str]
    block_multiple: int
    page_size: int
    page_is_block: bool = False
    default_block_size: int | None = None
    quantized_cache_dtypes: tuple[str, ...] = ()


PLATFORMS: dict[str, Platform] = {
    "cpu": Platform(
        stock_worker="vllm.v1.worker.cpu_worker.CPUWorker",
        worker=f"{_ENGINE}.cpu.worker.EvictionCPUWorker",
        backends={
            AttentionBackendEnum.CPU_ATTN: f"{_ENGINE}.cpu.backend.HeadwiseCPUAttentionBackend"
        },
        block_multiple=32,
        # The smallest block of the kernel's tiles: packed budgets waste the least in it.
        page_size=32,
        default_block_size=32,
        quantized_cache_dtypes=("fp8", "fp8_e4m3", "fp8_e5m2"),
    ),
    "cuda": Platform(
        stock_worker="vllm.v1.worker.gpu_worker.Worker",
        worker=f"{_ENGINE}.cuda.worker.EvictionGPUWorker",
        backends={
            AttentionBackendEnum.FLASH_ATTN: (
                f"{_ENGINE}.cuda.flash_attention.HeadwiseFlashAttentionBackend"
            ),
            AttentionBackendEnum.TRITON_ATTN: (
                f"{_ENGINE}.cuda.triton_attention.HeadwiseTritonAttentionBackend"
            ),
        },
        block_multiple=16,
        page_size=16,
        page_is_block=True,
        quantized_cache_dtypes=("fp8", "fp8_e4m3"),
    ),
}


def platform_name() -> str:
    """The platform, in vLLM's words; ROCm says that its devices are of type `cuda` too."""
    known = {"cpu": current_platform.is_cpu(), "cuda": current_platform.is_cuda()}
    return next((name for name, here in known.items() if here), current_platform.device_name)


def platform() -> Platform | None:
    """The record of this platform, or None if eviction does not know it."""
    return PLATFORMS.get(platform_name())


def block_size_of(vllm_config: VllmConfig) -> int:
    """Tokens per block of the layers that drop entries, as far as it is known.

    vLLM may enlarge blocks for what lies beside these layers, once the model is loaded.
    """
    cache = vllm_config.cache_config
    return int(cache.effective_attention_block_size or cache.block_size)


def fixed_page_size(vllm_config: VllmConfig) -> int | None:
    """Entries per page where blocks of any size have such pages; None where a page is a block."""
    here = platform()
    if here is None or (here.page_is_block and not vllm_config.model_config.is_hybrid):
        return None
    return here.page_size


def page_size_of(vllm_config: VllmConfig) -> int:
    """Entries per page."""
    return fixed_page_size(vllm_config) or block_size_of(vllm_config)


def tokens_ahead(vllm_config: VllmConfig) -> int:
    """Tokens for which requests have blocks before they are computed."""
    return int(vllm_config.num_lookahead_tokens)


def has_drafter_layers(vllm_config: VllmConfig) -> bool:
    """Whether requests are drafted by a model whose layers have a KV cache."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.uses_draft_kv_cache()


def tokens_in_graph(vllm_config: VllmConfig) -> int:
    """Tokens of a request in a step that runs as one graph; 0 where none does."""
    if not vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return 0
    return 1 + vllm_config.num_speculative_tokens


def has_fp8_caches() -> bool:
    """Whether vLLM's CPU kernel knows fp8 caches on this processor."""
    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


def unknown_platform() -> str | None:
    """Says that eviction does not know this platform; None if it does."""
    if platform() is not None:
        return None
    if not (name := platform_name()):  # vLLM for CUDA, where no driver shows it a card
        return "vLLM finds no device here; does `nvidia-smi` show one?"
    accepted = ", ".join(map(repr, PLATFORMS))
    return f"platform {name!r} has no backend yet; accepted: {accepted}"
