"""What a server says of eviction when it starts, and the sizes that it counts with."""

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_kvselect.config import EvictionConfig, Prefill
from vllm_kvselect.engine.log import logger
from vllm_kvselect.engine.models import layer_types
from vllm_kvselect.engine.platforms import (
    block_size_of,
    has_drafter_layers,
    page_size_of,
    platform_name,
    tokens_ahead,
)
from vllm_kvselect.machine import dtype_name, fast_dtype
from vllm_kvselect.planning.cuts import Cuts, budget_entries, cuts, whole_interval
from vllm_kvselect.registry import METHODS


def log_start(vllm_config: VllmConfig, eviction: EvictionConfig, choice: str = "") -> None:
    """Logs which method `auto` takes, and what is retained, where that is known before the start.

    `choice` says which method `auto` takes and why; it is empty where the operator named one.
    """
    if choice:
        logger.info("%s", choice)
    if not is_length_open(vllm_config):
        log_retained(vllm_config, eviction)
    if untried := not_run_on_a_card(vllm_config):
        logger.warning(
            "KV eviction: no GPU has run %s with it yet, only stand-ins on a processor "
            "(docs/cuda.md)",
            " and ".join(untried),
        )


def not_run_on_a_card(vllm_config: VllmConfig) -> list[str]:
    """What of a server's configuration no GPU has run with eviction; nothing on a processor."""
    if platform_name() != "cuda":
        return []
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    attention = vllm_config.attention_config
    capability = current_platform.get_device_capability()
    features = (
        (f"compute capability {capability.major}.{capability.minor}", capability[:2] != (9, 0)),
        ("Triton attention", attention.backend is AttentionBackendEnum.TRITON_ATTN),
        ("model runner V1", not vllm_config.use_v2_model_runner),
        ("drafters with layers", has_drafter_layers(vllm_config)),
        ("tensor parallelism", parallel.tensor_parallel_size > 1),
        ("pipeline parallelism", parallel.pipeline_parallel_size > 1),
        ("data parallelism", parallel.data_parallel_size > 1),
        ("expert parallelism", parallel.enable_expert_parallel),
        ("mixtures of experts", model.is_moe),
        ("hybrids", model.is_hybrid),
        ("sliding windows", "sliding_attention" in layer_types(vllm_config)),
        ("LoRA", vllm_config.lora_config is not None),
    )
    return [name for name, is_there in features if is_there]


def is_length_open(vllm_config: VllmConfig) -> bool:
    """Whether vLLM fits `max_model_len` to the pool, and a worker is the first to know it."""
    return bool(vllm_config.model_config.original_max_model_len == -1)


def log_retained(vllm_config: VllmConfig, eviction: EvictionConfig) -> None:
    """Logs what is retained, and warns where that is nothing or the data type is a slow one."""
    if useless := why_nothing_is_dropped(vllm_config, eviction):
        logger.warning("%s", useless)
    else:
        logger.info("%s", describe(vllm_config, eviction))
    if blind := why_blind(eviction):
        logger.warning("%s", blind)
    if slow := why_slow(vllm_config):
        logger.warning("%s", slow)


def describe(vllm_config: VllmConfig, eviction: EvictionConfig) -> str:
    """One line on what is retained and what that frees, for a prompt of `max_model_len`."""
    choice = ""
    if eviction.allow_override:
        choice = f"; requests may choose their {' and '.join(eviction.allow_override)}"
    choice = prefill_note(eviction) + choice + store_note(eviction)
    if not eviction.enabled:
        return f"KV eviction none: retains everything{choice}"
    num_tokens = vllm_config.model_config.max_model_len
    block_size = vllm_config.cache_config.block_size
    num_mib = block_bytes(vllm_config) / 2**20
    num_blocks = -(-num_tokens // block_size)
    planned = _cuts_of_longest(num_tokens, vllm_config, eviction)
    num_freed, rounds = planned.num_freed(num_tokens), ""
    is_late = vllm_config.model_config.is_hybrid  # blocks grow with the states, which are unknown
    interval = whole_interval(eviction, block_size)
    if interval and is_late:
        rounds = f"; drops while it is computed every {eviction.prompt_interval} tokens"
    elif eviction.prompt_interval:
        most = planned.most_held(num_tokens, block_size, tokens_ahead(vllm_config))
        rounds = (
            f"; drops while it is computed every {interval} tokens, so that it "
            f"never holds more than {most} blocks, {most * num_mib:.1f} MiB"
        )
    if eviction.decode_budget:
        rounds += (
            f"; brings requests that generate back to {eviction.decode_budget} entries every "
            f"{eviction.decode_interval} tokens"
        )
    elif eviction.prompt_interval:
        rounds += (
            "; answers grow: with --kv-eviction-decode-budget too, --max-model-len may exceed the "
            "pool"
        )
    layers, frees = "layer", ""
    if is_late:
        types = layer_types(vllm_config)
        layers = f"layer with full attention, {types.count('full_attention')} of {len(types)}"
    else:
        frees = (
            f"; frees {num_freed} of its {num_blocks} blocks, "
            f"{num_freed * num_mib:.1f} of {num_blocks * num_mib:.1f} MiB"
        )
    return (
        f"KV eviction {eviction.method}: retains {budget_entries(num_tokens, eviction)} entries "
        f"per KV head and {layers} (window {eviction.window} included) of a prompt of {num_tokens} "
        f"tokens{frees}{rounds}{choice}"
    )


def prefill_note(eviction: EvictionConfig) -> str:
    """What a server says of its prefill, where that is sparse."""
    sparse = eviction.of(Prefill)
    if sparse.prefill == "dense":
        return ""
    return (
        f"; prefills sparsely by {sparse.prefill}: from token {sparse.prefill_dense_until} on, "
        f"segments of {sparse.prefill_segment} tokens read {sparse.prefill_budget} before them"
    )


def store_note(eviction: EvictionConfig) -> str:
    """Where a server keeps compressed contexts, if it does."""
    if eviction.context_store is None:
        return ""
    most = eviction.context_store_bytes
    bound = "without a bound" if most is None else f"up to {most / 2**30:.1f} GiB"
    return f"; stores contexts in {eviction.context_store}, {bound}"


def why_nothing_is_dropped(vllm_config: VllmConfig, eviction: EvictionConfig) -> str | None:
    """Says why no prompt can ever be long enough for the budget, and what to do; None if one can.

    Where requests may choose their budget, one of them can.
    """
    if "budget" in eviction.allow_override or not eviction.may_evict:
        return None
    # With the method 'none' as default, requests may choose one that evicts, by this budget.
    evicting = eviction if eviction.enabled else eviction.model_copy(update={"method": "snapkv"})
    num_tokens = vllm_config.model_config.max_model_len
    block_size, page_size = vllm_config.cache_config.block_size, page_size_of(vllm_config)
    if _cuts_of_longest(num_tokens, vllm_config, evicting):
        return None
    # The longest answer is that to a prompt of one token.
    if "decode_budget" in eviction.allow_override:
        return None
    if cuts(1, block_size, evicting, num_tokens - 1, page_size):
        return None
    return (
        f"KV eviction {eviction.method} never drops anything here: the longest prompt "
        f"(--max-model-len) has {num_tokens} tokens, and a budget of {eviction.budget!r} retains "
        f"{min(budget_entries(num_tokens, eviction), num_tokens)} of them, less than a block of "
        f"{block_size} fewer; lower --kv-eviction-budget"
    )


def _cuts_of_longest(num_tokens: int, vllm_config: VllmConfig, eviction: EvictionConfig) -> Cuts:
    """The cuts in the longest prompt."""
    block_size, page_size = vllm_config.cache_config.block_size, page_size_of(vllm_config)
    return cuts(num_tokens, block_size, eviction, page_size=page_size)


def why_blind(eviction: EvictionConfig) -> str | None:
    """Says that a window inside a prompt does not know what is asked at its end; None elsewhere."""
    if not (eviction.enabled and eviction.prompt_interval):
        return None
    if METHODS[eviction.method].in_prompts:
        return None
    return (
        f"KV eviction {eviction.method} judges entries by the tokens after them, and with "
        "prompt_interval by those before each cut, far from the question; methods without a window "
        "do not: layer-probe, layer-keydiff"
    )


def why_slow(vllm_config: VllmConfig) -> str | None:
    """Says that this processor multiplies the model's data type slowly; None if it does not."""
    dtype = vllm_config.model_config.dtype
    is_slow = dtype is not torch.float32 and fast_dtype() is torch.float32
    if platform_name() != "cpu" or not is_slow:
        return None
    return (
        f"This processor has no instructions for {dtype_name(dtype)}: a model runs many times "
        "slower in it than in float32; add --dtype float32 (weights and KV cache then take twice "
        "the memory)"
    )


def block_entries(vllm_config: VllmConfig) -> int:
    """Entries in a block, of all layers with full attention and of all ranks together.

    Where there are fewer KV heads than ranks, vLLM gives each of these a copy, and each counts.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    num_layers = layer_types(vllm_config).count("full_attention")
    num_heads = model.get_num_kv_heads(parallel) * parallel.tensor_parallel_size
    return block_size_of(vllm_config) * num_layers * num_heads


def block_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of a block: what these entries take, and those of a drafter's layers."""
    model = vllm_config.model_config
    dtype = kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, model)
    num_bytes = block_entries(vllm_config) * 2 * model.get_head_size() * dtype.itemsize
    if has_drafter_layers(vllm_config):
        num_layers = model.get_total_num_hidden_layers()
        drafter = vllm_config.speculative_config.draft_model_config
        num_bytes += num_bytes // num_layers * drafter.get_total_num_hidden_layers()
    return num_bytes
