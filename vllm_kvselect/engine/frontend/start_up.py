"""What a server says of eviction when it starts, and the sizes that it counts with."""

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.models import layer_types
from vllm_kvselect.engine.platforms import platform_name
from vllm_kvselect.machine import dtype_name, fast_dtype
from vllm_kvselect.retention import budget_entries, cuts

logger = init_logger("vllm.kvselect")  # below "vllm", so that vLLM's logging settings apply


def log_start(vllm_config: VllmConfig, eviction: EvictionConfig) -> None:
    """Logs what is retained, and warns where that is nothing or the data type is a slow one.

    Args:
        vllm_config: vLLM's finished configuration.
        eviction: The validated configuration.
    """
    if useless := why_nothing_is_dropped(vllm_config, eviction):
        logger.warning("%s", useless)
    else:
        logger.info("%s", describe(vllm_config, eviction))
    if slow := why_slow(vllm_config):
        logger.warning("%s", slow)


def describe(vllm_config: VllmConfig, eviction: EvictionConfig) -> str:
    """One line on what is retained and what that frees, for a prompt of `max_model_len`."""
    choice = ""
    if eviction.allow_override:
        choice = f"; requests may choose their {' and '.join(eviction.allow_override)}"
    choice = prefill_note(eviction) + choice
    if not eviction.enabled:
        return f"KV eviction none: retains everything{choice}"
    num_tokens = vllm_config.model_config.max_model_len
    block_size = vllm_config.cache_config.block_size
    num_mib = block_bytes(vllm_config) / 2**20
    num_blocks = -(-num_tokens // block_size)
    num_freed = _num_freed(num_tokens, block_size, eviction)
    rounds = ""
    if eviction.decode_budget:
        rounds = (
            f"; brings requests that generate back to {eviction.decode_budget} entries every "
            f"{eviction.decode_interval} tokens"
        )
    return (
        f"KV eviction {eviction.method}: retains {budget_entries(num_tokens, eviction)} entries "
        f"per KV head and layer (window {eviction.window} included) of a prompt of {num_tokens} "
        f"tokens; frees {num_freed} of its {num_blocks} blocks, "
        f"{num_freed * num_mib:.1f} of {num_blocks * num_mib:.1f} MiB{rounds}{choice}"
    )


def prefill_note(eviction: EvictionConfig) -> str:
    """What a server says of its prefill, where that is sparse."""
    if eviction.prefill == "dense":
        return ""
    read = f"{eviction.prefill_budget} tokens"
    if eviction.prefill_coverage:
        read = f"blocks with {eviction.prefill_coverage:.0%} of the estimated attention"
    return (
        f"; prefills sparsely by {eviction.prefill}: from token {eviction.prefill_dense_until} on, "
        f"segments of {eviction.prefill_segment} tokens read {read} before them"
    )


def why_nothing_is_dropped(vllm_config: VllmConfig, eviction: EvictionConfig) -> str | None:
    """Says why no prompt can ever be long enough for the budget, and what to do; None if one can.

    Where requests may choose their budget, one of them can.
    """
    if "budget" in eviction.allow_override or not eviction.may_evict:
        return None
    # With the method 'none' as default, requests may choose one that evicts, by this budget.
    evicting = eviction if eviction.enabled else eviction.model_copy(update={"method": "snapkv"})
    num_tokens = vllm_config.model_config.max_model_len
    block_size = vllm_config.cache_config.block_size
    if _num_freed(num_tokens, block_size, evicting):
        return None
    # The longest answer is that to a prompt of one token.
    if "decode_budget" in eviction.allow_override or cuts(1, block_size, evicting, num_tokens - 1):
        return None
    return (
        f"KV eviction {eviction.method} never drops anything here: the longest prompt "
        f"(--max-model-len) has {num_tokens} tokens, and a budget of {eviction.budget!r} retains "
        f"{min(budget_entries(num_tokens, eviction), num_tokens)} of them, less than a block of "
        f"{block_size} fewer; lower --kv-eviction-budget"
    )


def _num_freed(num_tokens: int, block_size: int, eviction: EvictionConfig) -> int:
    """Blocks that the longest prompt frees, or the longest chat."""
    if eviction.context == "chat":
        eviction = eviction.model_copy(update={"context": num_tokens})
    return cuts(num_tokens, block_size, eviction).num_freed(num_tokens)


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
    return vllm_config.cache_config.block_size * num_layers * num_heads


def block_bytes(vllm_config: VllmConfig) -> int:
    """Bytes that these entries take."""
    model = vllm_config.model_config
    dtype = kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, model)
    return block_entries(vllm_config) * 2 * model.get_head_size() * dtype.itemsize
