"""What eviction cannot honour is refused at start-up, with the reason and what to do."""

from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_kvselect.config import ConfigError, EvictionConfig
from vllm_kvselect.engine import xformers_attention
from vllm_kvselect.engine.platforms import PLATFORMS, Platform, platform, platform_name
from vllm_kvselect.engine.spec import HeadwiseSpec, WindowSpec
from vllm_kvselect.machine import dtype_name
from vllm_kvselect.methods.registry import METHODS
from vllm_kvselect.retention import budget_entries

_FULL_OR_SLIDING = ("full_attention", "sliding_attention")


def refuse_unsupported(vllm_config: VllmConfig, eviction: EvictionConfig) -> None:
    """Checks a finished configuration of vLLM against what eviction supports.

    Args:
        vllm_config: vLLM's configuration.
        eviction: The validated configuration of eviction, enabled.

    Raises:
        ConfigError: With every reason against it.
    """
    problems = [
        *_platform_problems(vllm_config),
        *_model_problems(vllm_config),
        *_window_problems(vllm_config, eviction),
        *_feature_problems(vllm_config),
        *_block_problems(vllm_config),
        *_provider_problems(vllm_config, eviction),
        *settings_problems(vllm_config, eviction),
        *_scheduler_problems(vllm_config, eviction),
    ]
    if problems:
        raise ConfigError("kv_eviction cannot be used here: " + "; ".join(problems))


def settings_problems(vllm_config: VllmConfig, eviction: EvictionConfig) -> list[str]:
    """What stands against a method and a budget, of a server or of a single request.

    Args:
        vllm_config: vLLM's configuration.
        eviction: The validated configuration of eviction.

    Returns:
        One sentence for each problem, with what to do.
    """
    return [*_pool_problems(vllm_config, eviction), *_budget_problems(vllm_config, eviction)]


def may_pool(eviction: EvictionConfig) -> bool:
    """Whether a request may run with a method whose layers share pages."""
    if "method" in eviction.allow_override:
        return True
    return eviction.enabled and METHODS[eviction.method].pooled


def refuse_mixed_groups(kv_cache_config: KVCacheConfig, block_size: int) -> None:
    """Checks that one block manager, and it is ours, plans for all layers that drop entries.

    vLLM gives layers of different shapes a manager of its own: it would free nothing and hash
    blocks that the workers overwrite. Layers with a sliding window may have groups beside.

    Args:
        kv_cache_config: How vLLM grouped the layers.
        block_size: Tokens per block with which the workers plan.

    Raises:
        ConfigError: If full-attention layers are in several groups, or a group is not ours.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    full = [spec for spec in specs if isinstance(spec, HeadwiseSpec)]
    are_known = all(isinstance(spec, HeadwiseSpec | WindowSpec) for spec in specs)
    if len(full) != 1 or not are_known or any(spec.block_size != block_size for spec in specs):
        made = ", ".join(f"{type(spec).__name__} of {spec.block_size} tokens" for spec in specs)
        raise ConfigError(
            f"kv_eviction needs full-attention layers of one shape in one KV cache group with "
            f"blocks of {block_size} tokens, but vLLM made {made}; serve this model without "
            "--kv-eviction"
        )


def _platform_problems(vllm_config: VllmConfig) -> list[str]:
    here = platform()
    if here is None:
        accepted = ", ".join(map(repr, PLATFORMS))
        return [f"platform {platform_name()!r} has no backend yet; accepted: {accepted}"]
    worker = vllm_config.parallel_config.worker_cls
    problems = _cuda_problems(vllm_config, here) if platform_name() == "cuda" else []
    if worker != here.stock_worker:
        problems.append(f"worker_cls = {worker!r} replaces the worker; leave it at 'auto'")
    return problems


def _cuda_problems(vllm_config: VllmConfig, cuda: Platform) -> list[str]:
    """What stands against the backends that ours can stand in for."""
    attention, parallel = vllm_config.attention_config, vllm_config.parallel_config
    problems = []
    if attention.backend not in (None, *cuda.backends):
        accepted = " or ".join(backend.name for backend in cuda.backends)
        problems.append(
            f"attention backend {attention.backend.name} has no view of single heads yet; leave "
            f"--attention-backend out, or choose {accepted}"
        )
    features = {
        "an attention backend for each kind of layer": attention.backend_per_kind,
        "microbatches (--enable-dbo)": parallel.enable_dbo,
        "data parallelism on CUDA": parallel.data_parallel_size > 1,
        "pipeline parallelism on CUDA": parallel.pipeline_parallel_size > 1,
    }
    problems += [f"{name} is not supported; switch it off" for name, on in features.items() if on]
    return problems


def _provider_problems(vllm_config: VllmConfig, eviction: EvictionConfig) -> list[str]:
    if eviction.decode_attention == "backend":
        return []
    if platform_name() != "cuda":
        return ["decode_attention = 'xformers' needs CUDA; leave it out"]
    return xformers_attention.problems(vllm_config)


def _layer_types(vllm_config: VllmConfig) -> set[str]:
    """Kinds of attention in the model, by Hugging Face's names."""
    if vllm_config.cache_config.sliding_window is not None:  # set only where every layer slides
        return {"sliding_attention"}
    layer_types = getattr(vllm_config.model_config.hf_text_config, "layer_types", None)
    return set(layer_types or ["full_attention"])


def _model_problems(vllm_config: VllmConfig) -> list[str]:
    model, layer_types = vllm_config.model_config, _layer_types(vllm_config)
    reasons = {
        "uses MLA, whose cache has no entries per KV head": model.use_mla,
        "has no attention layers": model.is_attention_free,
        "mixes attention with state-space or linear-attention layers": model.is_hybrid,
        "is an encoder-decoder": model.is_encoder_decoder,
        "does not generate text (pooling)": model.runner_type != "generate",
        "has no layers with full attention, the only ones that drop entries": "full_attention"
        not in layer_types,
        f"has layers other than full attention and sliding windows "
        f"({', '.join(sorted(layer_types))})": not layer_types <= {*_FULL_OR_SLIDING}
        or model.attention_chunk_size is not None
        or model.rswa_window is not None,
        "attends to parts of its prompt in both directions": model.is_mm_prefix_lm,
    }
    return [
        f"model {model.model!r} {reason}; serve it without --kv-eviction"
        for reason, present in reasons.items()
        if present
    ]


def _feature_problems(vllm_config: VllmConfig) -> list[str]:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    speculative = vllm_config.speculative_config
    drafter, executor = speculative and speculative.method, parallel.distributed_executor_backend
    features = {
        # Other drafters bring layers of their own, or have not been run.
        f"speculative decoding by {drafter!r} (accepted: 'ngram')": drafter not in (None, "ngram"),
        "KV connectors (--kv-transfer-config)": vllm_config.kv_transfer_config is not None,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        f"--distributed-executor-backend {executor} (accepted: 'mp')": executor
        not in (None, "uni", "mp"),
        f"--kv-cache-dtype {cache.cache_dtype}": cache.cache_dtype
        not in _cache_dtypes(vllm_config),
        # Requests would not be checked, nor refusals counted: the plugin's front end is Python.
        "the Rust front end (VLLM_USE_RUST_FRONTEND)": bool(envs.VLLM_USE_RUST_FRONTEND),
        "KV sharing between layers (--kv-sharing-fast-prefill)": cache.kv_sharing_fast_prefill,
    }
    return [f"{name} is not supported; switch it off" for name, on in features.items() if on]


def _window_problems(vllm_config: VllmConfig, eviction: EvictionConfig) -> list[str]:
    """What stands against sliding windows beside full attention."""
    if "sliding_attention" not in _layer_types(vllm_config):
        return []
    problems = []
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        problems.append(
            "sliding windows beside full attention need vLLM's hybrid KV cache manager; leave "
            "--disable-hybrid-kv-cache-manager out"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        problems.append("sliding windows and pipeline parallelism together are not supported")
    if eviction.check_integrity:
        problems.append("check_integrity does not know sliding windows; leave it out")
    return problems


def _scheduler_problems(vllm_config: VllmConfig, eviction: EvictionConfig) -> list[str]:
    scheduler = vllm_config.scheduler_config.scheduler_cls
    if eviction.check_integrity and scheduler is not None:
        return [
            f"scheduler_cls = {scheduler!r} replaces the scheduler that check_integrity needs; "
            "leave one of them out"
        ]
    return []


def _pool_problems(vllm_config: VllmConfig, eviction: EvictionConfig) -> list[str]:
    if not eviction.enabled or not METHODS[eviction.method].pooled:
        return []
    reason = f"method = {eviction.method!r} shares pages between layers, which"
    problems = []
    scheduler = vllm_config.scheduler_config.scheduler_cls
    if scheduler is not None and not str(scheduler).startswith("vllm_kvselect."):
        problems.append(
            f"{reason} needs a scheduler of vllm-kvselect; leave scheduler_cls = {scheduler!r} "
            "out, or take another method"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        problems.append(
            f"{reason} pipeline parallelism puts into different processes; take another method, "
            "or tensor parallelism"
        )
    return problems


def _cache_dtypes(vllm_config: VllmConfig) -> tuple[str, ...]:
    """KV cache dtypes under which entries are stored as they are computed, and fp8 on CUDA."""
    here = platform()
    quantized = here.quantized_cache_dtypes if here else ()
    return ("auto", dtype_name(vllm_config.model_config.dtype), *quantized)


def _block_problems(vllm_config: VllmConfig) -> list[str]:
    block_size = vllm_config.cache_config.block_size
    here = platform()
    if here is not None and block_size % here.block_multiple:
        multiple = here.block_multiple
        return [f"block_size = {block_size} is not accepted; use a multiple of {multiple}"]
    return []


def _budget_problems(vllm_config: VllmConfig, eviction: EvictionConfig) -> list[str]:
    block_size = vllm_config.cache_config.block_size
    max_model_len = vllm_config.model_config.max_model_len
    least, entries = eviction.window + block_size, budget_entries(max_model_len, eviction)
    if entries < least:
        return [
            f"budget = {eviction.budget!r} retains {entries} entries of {max_model_len} tokens; "
            f"at least {least} are needed, the window of {eviction.window} and one block of "
            f"{block_size}"
        ]
    return []
