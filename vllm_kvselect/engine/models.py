"""Which models eviction serves: what their configs say, and what their loaded layers say."""

from collections.abc import Collection, Sequence

from vllm.config import ModelConfig, VllmConfig
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_kvselect.config import ConfigError, EvictionConfig
from vllm_kvselect.engine.platforms import has_drafter_layers
from vllm_kvselect.engine.refusal import sentences
from vllm_kvselect.engine.scheduler.spec import (
    OTHER_OPTIONS,
    Bystander,
    HeadwiseSpec,
    StateSpec,
    WindowSpec,
)
from vllm_kvselect.layer_kinds import HYBRID, WITHOUT_ATTENTION

_FULL_OR_SLIDING = ("full_attention", "sliding_attention")
_FULL = ("attention", "full_attention", HYBRID)
"""Names of full attention, alone or beside a state, in configs of models that keep states."""
_UNTRIED_STATES = {
    MambaAttentionBackendEnum.MAMBA1: "the first Mamba's states",
    MambaAttentionBackendEnum.LINEAR: "lightning attention",
}
_WINDOW_FIELDS = (
    "sliding_window",
    "hybrid_layer_pattern",  # MiMo-V2
    "interleaved_sliding_window",  # openPangu, and where vLLM finds a list in sliding_window
    "loop_window_size",  # IQuest-LoopCoder
    "sliding_windows",  # EXAONE MoE
)


def layer_types(vllm_config: VllmConfig) -> list[str]:
    """Kinds of attention of layers with a cache of their own, in order, by Hugging Face's names."""
    model = vllm_config.model_config
    num_layers = model.get_total_num_hidden_layers() - num_sharing_layers(model)
    named = getattr(model.hf_text_config, "layer_types", None)
    if model.is_hybrid:  # it keeps states in some layers; one may have attention beside them
        listed = getattr(model.hf_text_config, "layers_block_type", None) or named or ()
        return ["full_attention" if kind in _FULL else kind for kind in listed]
    if vllm_config.cache_config.sliding_window is not None:  # set only where every layer slides
        return ["sliding_attention"] * num_layers
    listed = named or ["full_attention"] * num_layers
    if model.disable_sliding_window or not _window_fields(model):
        # No window to slide, whatever the layer is called.
        listed = ["full_attention" if kind == "sliding_attention" else kind for kind in listed]
    return list(listed[:num_layers])


def num_sharing_layers(model: ModelConfig) -> int:
    """How many layers of a model, its last ones, read other layers' caches (Gemma 3n and 4)."""
    return getattr(model.hf_text_config, "num_kv_shared_layers", None) or 0


def _window_fields(model: ModelConfig) -> list[str]:
    """Fields in which the model's config has the size or the place of sliding windows."""
    return [name for name in _WINDOW_FIELDS if getattr(model.hf_text_config, name, None)]


def _unlisted_windows(model: ModelConfig) -> list[str]:
    """Fields by which a model without `layer_types` may decide which of its layers slide.

    vLLM's models read them each in its own way, so the layers are known only once they are loaded.
    """
    fields = _window_fields(model)
    if getattr(model.hf_text_config, "layer_types", None):
        return []
    if "sliding_window" in fields and getattr(model.hf_text_config, "sliding_window_pattern", None):
        return ["sliding_window_pattern"]
    return [name for name in fields if name != "sliding_window"]


def model_problems(vllm_config: VllmConfig) -> list[str]:
    """What stands against the model: one sentence for each problem, with what to do."""
    model, types = vllm_config.model_config, {*layer_types(vllm_config)}
    windows = _unlisted_windows(model)
    reasons = {
        "uses MLA, whose cache has no entries per KV head": model.use_mla,
        "has no attention layers": model.is_attention_free,
        "is an encoder-decoder": model.is_encoder_decoder,
        "does not generate text (pooling)": model.runner_type != "generate",
        "has no layers with full attention, the only ones that drop entries": "full_attention"
        not in types
        and not windows,
        f"has layers other than full attention and states "
        f"({', '.join(sorted(types))})": model.is_hybrid
        and not types <= {"full_attention", *WITHOUT_ATTENTION},
        f"has layers other than full attention and sliding windows ({', '.join(sorted(types))})": (
            not model.is_hybrid and not types <= {*_FULL_OR_SLIDING}
        )
        or model.attention_chunk_size is not None
        or model.rswa_window is not None,
        f"has no layer_types in its config, and may give some of its layers a sliding window by "
        f"{' and '.join(windows)}": bool(windows),
        "attends to parts of its prompt in both directions": model.is_mm_prefix_lm,
    }
    return [
        f"model {model.model!r} {problem}"
        for problem in sentences("{}; serve it without --kv-eviction", reasons)
    ]


def bystander_problems(vllm_config: VllmConfig, eviction: EvictionConfig) -> list[str]:
    """What stands against layers that drop nothing, beside full attention."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    kind = "state-space and linear-attention layers"
    if not model.is_hybrid:
        if "sliding_attention" not in layer_types(vllm_config):
            return []
        kind = "sliding windows"
    problems = []
    if not model.is_hybrid and has_drafter_layers(vllm_config):
        problems.append(f"drafters with layers were not tried beside {kind}; leave them out")
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        problems.append(
            f"{kind} beside full attention need vLLM's hybrid KV cache manager; leave "
            "--disable-hybrid-kv-cache-manager out"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        problems.append(f"{kind} and pipeline parallelism together are not supported")
    if not model.is_hybrid:
        return problems
    features = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "sparse prefill": eviction.may_prefill_sparsely,
        f"--mamba-cache-mode {cache.mamba_cache_mode}": cache.mamba_cache_mode == "all",
        "--prefix-match-unit": cache.prefix_match_unit is not None,
    }
    return problems + sentences(f"{{}} was not tried beside {kind}; leave it out", features)


def refuse_drafter_apart(groups: Sequence[Sequence[str]], of_drafter: Collection[str]) -> None:
    """Checks that a drafter's layers follow their target's, and share its page tables.

    Raises:
        ConfigError: If they are elsewhere: vLLM sets layers with another number of heads apart.
    """
    names = [name for group in groups for name in group]
    if len(groups) != 1 or {*names[-len(of_drafter) :]} != {*of_drafter}:
        raise ConfigError(
            "kv_eviction needs a drafter whose layers have as many heads as the model's, behind "
            "these; leave --kv-eviction or this drafter out"
        )


def refuse_other_options(kv_cache_config: KVCacheConfig, eviction: EvictionConfig) -> None:
    """Checks that the scheduler plans with what this worker retains by.

    They are started from one command line, unless there are several nodes.

    Raises:
        ConfigError: If the two differ.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if any(getattr(spec, "eviction", eviction) != eviction for spec in specs):
        raise ConfigError(OTHER_OPTIONS)


def refuse_mixed_groups(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> None:
    """Checks that the loaded layers are what eviction plans and counts with.

    One block manager, and it is ours, must plan for all layers that drop entries: vLLM gives layers
    of different shapes a manager of its own, which would free nothing and hash blocks that the
    workers overwrite. Layers with a sliding window or a state may have groups beside, with blocks
    of any size, where the model's config says so: what they exclude was checked there.

    Raises:
        ConfigError: If full-attention layers are in several groups, a group is not ours, or config
            and layers disagree on those that drop nothing.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    full = [spec for spec in specs if isinstance(spec, HeadwiseSpec)]
    are_known = all(isinstance(spec, HeadwiseSpec | Bystander) for spec in specs)
    if len(full) != 1 or not are_known:
        made = ", ".join(f"{type(spec).__name__} of {spec.block_size} tokens" for spec in specs)
        raise ConfigError(
            f"kv_eviction needs full-attention layers of one shape in one KV cache group, but vLLM "
            f"made {made}; serve this model without --kv-eviction, or without a drafter of another "
            "shape"
        )
    model = vllm_config.model_config
    for kind, spec_class, is_expected in (
        ("have a sliding window", WindowSpec, "sliding_attention" in layer_types(vllm_config)),
        ("keep a state", StateSpec, model.is_hybrid),
    ):
        if any(isinstance(spec, spec_class) for spec in specs) != is_expected:
            raise ConfigError(
                f"the config of model {model.model!r} (layer_types) and its loaded layers disagree "
                f"on which of them {kind}; serve it without --kv-eviction"
            )
    for spec in specs:
        if isinstance(spec, StateSpec) and spec.mamba_type in _UNTRIED_STATES:
            raise ConfigError(
                f"kv_eviction was not tried beside layers with {_UNTRIED_STATES[spec.mamba_type]}; "
                "serve this model without --kv-eviction"
            )
