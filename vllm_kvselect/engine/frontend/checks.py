"""What eviction cannot honour is refused at start-up, with the reason and what to do."""

from pathlib import Path

from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_kvselect.config import ConfigError, EvictionConfig, Prefill
from vllm_kvselect.engine import refusal
from vllm_kvselect.engine.cuda import xformers_attention
from vllm_kvselect.engine.cuda.backends import backend_problems
from vllm_kvselect.engine.models import (
    bystander_problems,
    layer_types,
    model_problems,
    num_sharing_layers,
)
from vllm_kvselect.engine.platforms import (
    PLATFORMS,
    has_drafter_layers,
    has_fp8_caches,
    page_size_of,
    platform,
    platform_name,
    tokens_in_graph,
    unknown_platform,
)
from vllm_kvselect.machine import dtype_name
from vllm_kvselect.planning.cuts import budget_problem
from vllm_kvselect.registry import METHODS, not_served
from vllm_kvselect.store.folder import Folder

_DRAFTERS = ("draft_model", "eagle", "eagle3", "mtp")
"""Drafters with layers of their own, where these lie in the KV cache group of their target's."""

_SWITCH_OFF = "{} is not supported; switch it off"

_KNOWN_WEIGHTS = ("auto", "hf", "safetensors", "fastsafetensors", "runai_streamer")
"""Load formats of weights that are what is in the model's safetensors files."""


def refuse_unsupported(vllm_config: VllmConfig, eviction: EvictionConfig) -> None:
    """Checks a finished configuration of vLLM against what eviction supports.

    Raises:
        ConfigError: With every reason against it.
    """
    problems = [
        *platform_problems(vllm_config),
        *model_problems(vllm_config),
        *(backend_problems(vllm_config) if platform_name() == "cuda" else ()),
        *bystander_problems(vllm_config, eviction),
        *_feature_problems(vllm_config),
        *_drafter_problems(vllm_config),
        *_executor_problems(vllm_config),
        *_block_problems(vllm_config),
        *_provider_problems(vllm_config, eviction),
        *settings_problems(vllm_config, eviction),
        *_scheduler_problems(vllm_config),
        *_round_problems(vllm_config, eviction),
        *_prefill_problems(vllm_config, eviction),
        *_store_problems(vllm_config, eviction),
    ]
    if problems:
        raise ConfigError("kv_eviction cannot be used here: " + "; ".join(problems))


def settings_problems(vllm_config: VllmConfig, eviction: EvictionConfig) -> list[str]:
    """What stands against a method and a budget, of a server or of a single request."""
    if problem := not_served(eviction.method):
        return [f"method = {eviction.method!r} {problem}"]
    length, page_size = vllm_config.model_config.max_model_len, page_size_of(vllm_config)
    problem = budget_problem(length, page_size, eviction)
    return [*pool_problems(vllm_config, eviction), *filter(None, [problem])]


def platform_problems(vllm_config: VllmConfig) -> list[str]:
    """What stands against the platform and its worker, whatever the model."""
    if problem := unknown_platform():
        return [problem]
    worker, here = vllm_config.parallel_config.worker_cls, PLATFORMS[platform_name()]
    problems = {"cpu": _cpu_problems, "cuda": _cuda_problems}[platform_name()](vllm_config)
    if worker != here.stock_worker:
        problems.append(f"worker_cls = {worker!r} replaces the worker; leave it at 'auto'")
    return problems


def _cpu_problems(vllm_config: VllmConfig) -> list[str]:
    """What stands against the model runner, of which vLLM takes the new one beside triton-cpu."""
    problems = _fp8_problems_on_cpu(vllm_config)
    if vllm_config.use_v2_model_runner:
        problems.append(
            "model runner V2 on CPU is not supported yet; set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    return problems


def _fp8_problems_on_cpu(vllm_config: VllmConfig) -> list[str]:
    """What vLLM itself refuses an fp8 cache for, but late and without saying what to do."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    if not is_quantized_kv_cache(cache.cache_dtype) or model is None:
        return []
    reasons = {
        "needs a processor with AVX-512 or AMX": not has_fp8_caches(),
        "needs heads whose size is divisible by 32": model.get_head_size() % 32,
        "is of all layers: leave --kv-cache-dtype-skip-layers out": bool(
            cache.kv_cache_dtype_skip_layers
        ),
    }
    text = "an fp8 KV cache on CPU {}; change it, or leave --kv-cache-dtype out"
    return refusal.sentences(text, reasons)


def _cuda_problems(vllm_config: VllmConfig) -> list[str]:
    """What stands against the backends that ours can stand in for."""
    attention, parallel = vllm_config.attention_config, vllm_config.parallel_config
    backends, problems = PLATFORMS["cuda"].backends, []
    if attention.backend not in (None, *backends):
        accepted = " or ".join(backend.name for backend in backends)
        problems.append(
            f"attention backend {attention.backend.name} has no view of single heads yet; leave "
            f"--attention-backend out, or choose {accepted}"
        )
    features = {
        "an attention backend for each kind of layer": attention.backend_per_kind,
        "microbatches (--enable-dbo)": parallel.enable_dbo,
        # Engines that come and go run requests whose blocks are redirected.
        "elastic expert parallelism (--enable-elastic-ep)": parallel.enable_elastic_ep,
    }
    return problems + refusal.sentences(_SWITCH_OFF, features)


def _provider_problems(vllm_config: VllmConfig, eviction: EvictionConfig) -> list[str]:
    if eviction.decode_attention == "backend":
        return []
    if platform_name() != "cuda":
        return ["decode_attention = 'xformers' needs CUDA; leave it out"]
    return xformers_attention.problems(vllm_config)


def _feature_problems(vllm_config: VllmConfig) -> list[str]:
    parallel, cache, here = vllm_config.parallel_config, vllm_config.cache_config, platform()
    # Under these entries are stored as they are computed, or quantised as we know.
    quantized = here.quantized_cache_dtypes if here else ()
    cache_dtypes = ("auto", dtype_name(vllm_config.model_config.dtype), *quantized)
    features = {
        "KV connectors (--kv-transfer-config)": vllm_config.kv_transfer_config is not None,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        f"--kv-cache-dtype {cache.cache_dtype}": cache.cache_dtype not in cache_dtypes,
        # Requests would not be checked, nor refusals counted: the plugin's front end is Python.
        "the Rust front end (VLLM_USE_RUST_FRONTEND)": bool(envs.VLLM_USE_RUST_FRONTEND),
        "KV sharing between layers (--kv-sharing-fast-prefill)": cache.kv_sharing_fast_prefill,
    }
    return refusal.sentences(_SWITCH_OFF, features)


def _drafter_problems(vllm_config: VllmConfig) -> list[str]:
    """What stands against what drafts tokens."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method == "ngram":
        return []
    accepted = ("ngram", *_DRAFTERS)
    if speculative.method not in accepted:
        drafter, names = speculative.method, " or ".join(map(repr, accepted))
        return [f"speculative decoding by {drafter!r} is not supported here; choose {names}"]
    parallel = vllm_config.parallel_config
    features = {
        "that draft several tokens at once (parallel_drafting)": speculative.parallel_drafting,
        "with several MTP modules, each of which reads further ahead": (
            speculative.use_multi_module_mtp()
        ),
        # The device decides how many tokens each request verifies, and the host does not know.
        "with enable_adaptive_verification": speculative.enable_adaptive_verification,
        "beside pipeline parallelism": parallel.pipeline_parallel_size > 1,
        # vLLM's adapters on CPU take the rows of a draft for those of the step, and raise.
        "that share the model's embeddings (EAGLE) beside --enable-lora": (
            vllm_config.lora_config is not None and speculative.method != "draft_model"
        ),
    }
    return refusal.sentences("drafters {} are not supported; leave one of them out", features)


def _executor_problems(vllm_config: VllmConfig) -> list[str]:
    """What stands against what starts the workers and hands them their steps."""
    executor = vllm_config.parallel_config.distributed_executor_backend
    if executor in (None, "uni", "mp"):
        return []
    if executor != "ray":
        return [
            f"--distributed-executor-backend {executor} is not supported; choose 'mp' or 'ray', or "
            "leave it out"
        ]
    if not current_platform.ray_device_key:
        return [f"vLLM does not support Ray on {platform_name()!r}; leave it out, or use --nnodes"]
    if not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True):
        # It asks the model runner for a step, not the worker. vLLM 0.33 has it no more.
        return [
            "vLLM's older Ray executor leaves workers out; unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
        ]
    return []


def _scheduler_problems(vllm_config: VllmConfig) -> list[str]:
    """What stands against our scheduler, which decides where chunks end and tells workers more."""
    scheduling, problems = vllm_config.scheduler_config, []
    scheduler, longest = scheduling.scheduler_cls, scheduling.long_prefill_token_threshold
    if scheduler is not None and not str(scheduler).startswith("vllm_kvselect."):
        problems.append(
            f"scheduler_cls = {scheduler!r} replaces the scheduler that --kv-eviction and "
            "--kv-prefill need; leave one of them out"
        )
    if 0 < longest < (least := 2 * tokens_in_graph(vllm_config) + 1):
        problems.append(
            f"long_prefill_token_threshold = {longest} makes chunks so short that a graph hides "
            f"the queries of a prompt's last tokens; set it to {least} at least, or to 0"
        )
    return problems


def _round_problems(vllm_config: VllmConfig, eviction: EvictionConfig) -> list[str]:
    """What stands against dropping entries again while requests generate."""
    is_early = vllm_config.scheduler_config.async_scheduling
    if not (eviction.may_make_rounds and vllm_config.speculative_config and is_early):
        return []
    return [
        "decode_budget needs to know how many drafted tokens were accepted, which the scheduler "
        "learns a step later under async scheduling; add --no-async-scheduling, or leave "
        "--speculative-config or decode_budget out"
    ]


def _prefill_problems(vllm_config: VllmConfig, eviction: EvictionConfig) -> list[str]:
    """What stands against sparse prefills."""
    if not eviction.may_prefill_sparsely:
        return []
    scheduling, cache = vllm_config.scheduler_config, vllm_config.cache_config
    sparse, problems = eviction.of(Prefill), []
    if num_sharing_layers(vllm_config.model_config):
        problems.append(
            "prefill = 'critiprefill' was not tried with layers that read other layers' caches; "
            "leave it out"
        )
    size, block = sparse.prefill_segment, sparse.prefill_block
    # Blocks get names by what their segments read, so a segment must not be part of one.
    if block % cache.block_size:
        problems.append(
            f"prefill_block = {block} is no multiple of the cache's block_size = "
            f"{cache.block_size}; make it one"
        )
    speculative = vllm_config.speculative_config
    per_step = 1 + (speculative.num_speculative_tokens if speculative else 0)
    least = size + per_step * (scheduling.max_num_seqs - 1)
    if scheduling.max_num_batched_tokens < least:
        problems.append(
            f"a segment of prefill_segment = {size} tokens is computed in one step, beside up to "
            f"{scheduling.max_num_seqs - 1} requests that generate: set --max-num-batched-tokens "
            f"to at least {least}, lower --max-num-seqs, or choose smaller segments"
        )
    if 0 < scheduling.long_prefill_token_threshold < size:
        problems.append(
            f"--long-prefill-token-threshold {scheduling.long_prefill_token_threshold} is less "
            f"than a segment of prefill_segment = {size} tokens; raise it, or choose smaller ones"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        problems.append(
            "prefill = 'critiprefill' smooths over layers, which pipeline parallelism puts into "
            "different processes; leave one of them out"
        )
    return problems


def _store_problems(vllm_config: VllmConfig, eviction: EvictionConfig) -> list[str]:
    """What stands against contexts in a folder."""
    if eviction.context_store is None:
        return []
    load_format, page_size = str(vllm_config.load_config.load_format), page_size_of(vllm_config)
    reasons = {
        "no request may mark a context: add --kv-eviction-context": not eviction.may_share,
        "prefills must be dense: leave --kv-prefill out": eviction.may_prefill_sparsely,
        "prefix caching must be on": not vllm_config.cache_config.enable_prefix_caching,
        "drafters must have no layers: choose 'ngram'": has_drafter_layers(vllm_config),
        "all layers must have full attention": vllm_config.model_config.is_hybrid
        or {*layer_types(vllm_config)} != {"full_attention"},
        f"blocks must be as large as pages: set --block-size to {page_size}": page_size
        != vllm_config.cache_config.block_size,
        "pipeline parallelism is not supported": vllm_config.parallel_config.pipeline_parallel_size
        > 1,
        f"weights in the load format {load_format!r} have no fingerprint": load_format
        not in _KNOWN_WEIGHTS,
    }
    text = "context_store cannot be used: {}; change it, or leave context_store out"
    problems = refusal.sentences(text, reasons)
    try:
        Folder(Path(eviction.context_store)).make()
    except ConfigError as error:
        problems.append(str(error))
    return problems


def pool_problems(vllm_config: VllmConfig, eviction: EvictionConfig) -> list[str]:
    """What stands against a method whose layers share pages."""
    if not eviction.enabled or not METHODS[eviction.method].pooled:
        return []
    reason = f"method = {eviction.method!r} shares pages between layers, which"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return [
            f"{reason} pipeline parallelism puts into different processes; take another method, "
            "or tensor parallelism"
        ]
    return []


def _block_problems(vllm_config: VllmConfig) -> list[str]:
    block_size = vllm_config.cache_config.block_size
    here = platform()
    if here is not None and block_size % here.block_multiple:
        multiple = here.block_multiple
        return [f"block_size = {block_size} is not accepted; use a multiple of {multiple}"]
    return []
