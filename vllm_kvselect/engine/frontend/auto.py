"""`auto`: the best method that a model allows, and its interval, chosen once, before all starts.

Everything behind the front end sees the method that was chosen. What only the loaded model shows,
a worker finds out: it then refuses the start and names the next best (`step/worker.py`).
"""

from typing import Any

from vllm.config import VllmConfig

from vllm_kvselect.config import ConfigError, EvictionConfig
from vllm_kvselect.engine.frontend.checks import pool_problems
from vllm_kvselect.engine.models import layer_types
from vllm_kvselect.engine.platforms import has_drafter_layers
from vllm_kvselect.probes.fingerprint import fingerprint
from vllm_kvselect.probes.places import find_probe
from vllm_kvselect.registry import AUTO, AUTO_INTERVAL, METHODS, PREFERRED, Method
from vllm_kvselect.scorers import ProbeFile


def is_auto(settings: dict[str, Any]) -> bool:
    """Whether the method is left to us."""
    return settings.get("method") == AUTO


def provisional(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings in which the method that every model allows stands for `auto`."""
    return settings | {"method": PREFERRED[-1]} if is_auto(settings) else settings


def choose(vllm_config: VllmConfig, eviction: EvictionConfig) -> tuple[EvictionConfig, str]:
    """Takes the first of `PREFERRED` with nothing against it.

    Returns:
        The configuration with that method, and with an interval where states can be found and none
        was asked for; and a sentence on which they are and why.
    """
    passed_over = []
    for name in PREFERRED:
        changed = eviction.model_copy(update={"method": name})
        if obstacle := _obstacle(vllm_config, changed, METHODS[name]):
            passed_over.append(f"not {name}: {obstacle}")
            continue
        why = "; ".join(passed_over) or "a probe of this model is at hand"
        choice = f"KV eviction auto takes {name} ({why})"
        if _finds_states(vllm_config, changed):
            changed = changed.model_copy(update={"prompt_interval": AUTO_INTERVAL})
            choice += (
                f" and cuts prompts every {AUTO_INTERVAL} tokens "
                "(--kv-eviction-prompt-interval 0 to cut them at their ends alone)"
            )
        return changed, choice
    raise AssertionError(passed_over)


def _obstacle(vllm_config: VllmConfig, eviction: EvictionConfig, method: Method) -> str:
    """What is known to stand against a method before the model is loaded; empty if nothing."""
    for name in ("decode_budget", "prompt_interval"):
        if getattr(eviction, name) and method.not_in_rounds:
            return f"with {name}, {method.not_in_rounds}"
    if problems := pool_problems(vllm_config, eviction):
        return problems[0]
    model = vllm_config.model_config
    media = model.multimodal_config if model.uses_mrope else None
    if "rotation" in method.needs and media is not None and not media.language_model_only:
        return "requests with images would be refused: their positions have several parts (M-RoPE)"
    if "probe" in method.needs:
        return _no_probe(vllm_config, eviction.of(ProbeFile).probe)
    return ""


def _finds_states(vllm_config: VllmConfig, eviction: EvictionConfig) -> bool:
    """Whether `auto` cuts prompts: somebody finds what is left, and nothing else was asked for."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return (
        METHODS[eviction.method].in_prompts
        and not {"prompt_interval", "context_store"} & eviction.model_fields_set
        and not eviction.may_prefill_sparsely
        and bool(cache.enable_prefix_caching)
        and model.max_model_len > AUTO_INTERVAL
        and not model.is_hybrid
        and {*layer_types(vllm_config)} == {"full_attention"}
        and not has_drafter_layers(vllm_config)
    )


def _no_probe(vllm_config: VllmConfig, file: str | None) -> str:
    """Why there is no probe of the model, and the command that makes one; empty if there is one."""
    model, num_ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    if num_ranks > model.get_total_num_kv_heads():
        return "a probe is split by KV heads, of which there are fewer than ranks"
    if file is not None:
        return ""  # the operator wants it; the worker refuses one that does not fit
    try:
        own = fingerprint(model.model, model.revision, vllm_config.load_config.download_dir)
    except ConfigError as error:
        return f"{error}; `vllm-kvselect calibrate {model.model}` makes a probe"
    try:
        find_probe(model.model, own, None)
    except ConfigError as error:
        return str(error)
    return ""
