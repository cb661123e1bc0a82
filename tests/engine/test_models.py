"""Which models eviction serves, by what their configs say and what their loaded layers are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    UniformTypeKVCacheSpecs,
)

from tests.engine.configurations import EVICTION, SMALL, create, drafting, written
from vllm_kvselect.config import ConfigError, EvictionConfig
from vllm_kvselect.engine import start_up as report
from vllm_kvselect.engine.frontend.checks import refuse_unsupported
from vllm_kvselect.engine.models import (
    layer_types,
    refuse_drafter_apart,
    refuse_mixed_groups,
    refuse_other_options,
)
from vllm_kvselect.engine.scheduler.spec import HeadwiseSpec, StateSpec, WindowSpec

GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "head_dim": 32,
}
MODELS = {
    "MLA": (
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "first_k_dense_replace": 2,
        },
        "uses MLA",
    ),
    "sliding window": (
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64},
        "has no layers with full attention",
    ),
    "sliding layers": (
        {**GEMMA, "layer_types": ["sliding_attention"] * 2},
        "has no layers with full attention",
    ),
    "chunked attention": (
        {**GEMMA, "layer_types": ["chunked_attention", "full_attention"]},
        r"other than full attention and sliding windows \(chunked_attention, full_attention\)",
    ),
    "windows by a list": (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "interleaved_sliding_window": [64, None],
        },
        "has no layer_types in its config.*sliding window by interleaved_sliding_window",
    ),
    "windows by a pattern": (
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": 64,
            "sliding_window_pattern": 2,
        },
        "has no layer_types in its config.*sliding window by sliding_window_pattern",
    ),
    "no attention": (
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "state_size": 8},
        "has no attention layers",
    ),
    "encoder": ({"architectures": ["BertModel"], "model_type": "bert"}, "does not generate text"),
}

SHAPE: dict[str, Any] = {"eviction": EVICTION, "head_size": 64, "dtype": torch.float32}
ONE = HeadwiseSpec(block_size=32, num_kv_heads=1, **SHAPE)
TWO = HeadwiseSpec(block_size=32, num_kv_heads=2, **SHAPE)
WINDOW = WindowSpec(block_size=32, num_kv_heads=1, sliding_window=64, **SHAPE)
UNKNOWN = ChunkedLocalAttentionSpec(
    block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32, attention_chunk_size=64
)
UNIFORM = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": ONE, "b": TWO})


def kv_cache_config(*specs: Any) -> KVCacheConfig:
    return KVCacheConfig(10, [], [KVCacheGroupSpec(["a", "b"], spec) for spec in specs])


@pytest.fixture
def gemma(tmp_path: Path) -> dict[str, Any]:
    """A model of which one layer of two has a sliding window."""
    return written(tmp_path, **GEMMA)


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_served(name: str, tmp_path: Path) -> None:
    config, reason = MODELS[name]
    model = written(tmp_path, **config)
    with pytest.raises(ConfigError, match=f"{reason}.*serve it without --kv-eviction"):
        create({}, **model)


def test_a_drafter_lies_in_the_group_of_its_target(gemma: dict[str, Any]) -> None:
    two = kv_cache_config(ONE, replace(ONE, head_size=2 * ONE.head_size))
    with pytest.raises(ConfigError, match=r"of one shape.*or without a drafter of another shape"):
        refuse_mixed_groups(two, drafting("eagle"))
    refuse_drafter_apart([["a", "b", "c"]], {"b", "c"})
    for groups in ([["a"], ["b", "c"]], [["b", "c", "a"]]):
        with pytest.raises(ConfigError, match=r"as many heads as the model's, behind these; leave"):
            refuse_drafter_apart(groups, {"b", "c"})
    with pytest.raises(ConfigError, match="drafters with layers were not tried beside sliding"):
        refuse_unsupported(drafting("eagle", **gemma), EVICTION)


def test_sliding_windows_beside_full_attention_and_what_they_exclude(gemma: dict[str, Any]) -> None:
    create({}, **gemma)
    with pytest.raises(ConfigError, match=r"hybrid KV cache manager; leave --disable-hybrid"):
        create({}, disable_hybrid_kv_cache_manager=True, **gemma)
    create({"check_integrity": True}, **gemma)
    with pytest.raises(ConfigError, match=r"sliding windows and pipeline parallelism together"):
        create({}, pipeline_parallel_size=2, **gemma)


def test_layers_of_different_shapes_are_refused(gemma: dict[str, Any]) -> None:
    full, sliding = create({}), create({}, **gemma)
    refuse_mixed_groups(kv_cache_config(ONE), full)
    refuse_mixed_groups(kv_cache_config(WINDOW, ONE, WINDOW), sliding)
    for specs in ([UNIFORM], [ONE, ONE], [WINDOW], [ONE, UNIFORM], []):
        with pytest.raises(ConfigError, match="full-attention layers of one shape in one KV cache"):
            refuse_mixed_groups(kv_cache_config(*specs), full)
    with pytest.raises(ConfigError, match=r"Spec of \d\d tokens.*serve this model without"):
        refuse_mixed_groups(kv_cache_config(ONE, WINDOW, UNKNOWN), sliding)


def test_layers_that_drop_nothing_may_have_blocks_of_another_size(gemma: dict[str, Any]) -> None:
    other = replace(WINDOW, block_size=256)
    refuse_mixed_groups(kv_cache_config(other, ONE), create({}, **gemma))


HYBRIDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Lfm2ForCausalLM": (
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        ["conv", "full_attention"],
    ),
    "GraniteMoeHybridForCausalLM": (
        {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]},
        ["linear_attention", "full_attention"],
    ),
    "FalconH1ForCausalLM": ({"model_type": "falcon_h1"}, ["full_attention"] * 2),
    "NemotronHForCausalLM": (
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M*"},
        ["linear_attention", "full_attention"],
    ),
    "Qwen3NextForCausalLM": (
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
        ["linear_attention", "full_attention"],
    ),
}


def hybrid(folder: Path, architecture: str) -> dict[str, Any]:
    """A model that keeps states in one layer of two."""
    return written(folder, architectures=[architecture], **HYBRIDS[architecture][0])


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_only_layers_with_full_attention_count_beside_states(
    architecture: str, tmp_path: Path
) -> None:
    config = create({}, **hybrid(tmp_path, architecture))
    kinds = HYBRIDS[architecture][1]
    assert layer_types(config) == kinds
    num_heads = SMALL["num_key_value_heads"]
    assert report.block_entries(config) == 32 * num_heads * kinds.count("full_attention")
    assert f"layer with full attention, {kinds.count('full_attention')} of 2 (window" in (
        report.describe(config, EVICTION)
    )


@pytest.mark.parametrize(
    ("eviction", "settings", "reason"),
    [
        ({}, {"pipeline_parallel_size": 2}, "and pipeline parallelism together"),
        ({}, {"prefix_match_unit": 16}, "--prefix-match-unit was not tried beside state-space"),
        ({"prefill": "critiprefill"}, {}, "sparse prefill was not tried beside state-space"),
        (
            {},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative decoding was not tried beside state-space",
        ),
    ],
)
def test_what_states_beside_attention_exclude(
    eviction: dict[str, Any], settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        create(eviction, **hybrid(tmp_path, "Lfm2ForCausalLM"), **settings)


def test_states_of_kinds_that_were_not_tried_are_refused(tmp_path: Path) -> None:
    config = create({}, **hybrid(tmp_path, "Lfm2ForCausalLM"))
    state = StateSpec(block_size=32, shapes=((2, 64),), dtypes=(torch.float32,), eviction=EVICTION)
    refuse_mixed_groups(kv_cache_config(state, ONE), config)
    for kind, reason in ((Kind.MAMBA1, "the first Mamba's states"), (Kind.LINEAR, "lightning")):
        with pytest.raises(ConfigError, match=rf"not tried beside layers with {reason}"):
            refuse_mixed_groups(kv_cache_config(replace(state, mamba_type=kind), ONE), config)
    with pytest.raises(ConfigError, match="disagree on which of them keep a state"):
        refuse_mixed_groups(kv_cache_config(ONE), config)


def test_nodes_that_do_not_plan_alike_are_refused() -> None:
    mine, theirs = ONE.eviction, EvictionConfig(method="adakv-perturb", budget=100)
    other = replace(ONE, eviction=theirs)
    stock = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32)
    assert HeadwiseSpec.merge([ONE, ONE]) == ONE
    for stages in ([ONE, other], [other, ONE], [ONE, stock]):
        with pytest.raises(ConfigError, match="different --kv-eviction"):
            HeadwiseSpec.merge(stages)
    refuse_other_options(kv_cache_config(ONE, WINDOW), mine)
    for specs in ([other], [ONE, replace(WINDOW, eviction=theirs)]):
        with pytest.raises(ConfigError, match="different --kv-eviction"):
            refuse_other_options(kv_cache_config(*specs), mine)


def test_loaded_layers_that_are_not_what_the_config_says_are_refused(gemma: dict[str, Any]) -> None:
    for config, specs in ((create({}), (ONE, WINDOW)), (create({}, **gemma), (ONE,))):
        with pytest.raises(ConfigError, match=r"layers disagree on which.*serve it without"):
            refuse_mixed_groups(kv_cache_config(*specs), config)


def test_layers_whose_window_is_switched_off_count_as_full(gemma: dict[str, Any]) -> None:
    config = create({}, **gemma)
    assert layer_types(config) == ["sliding_attention", "full_attention"]
    off = create({"budget": 64}, **gemma | {"max_model_len": None}, disable_sliding_window=True)
    assert layer_types(off) == ["full_attention"] * 2
    assert report.block_entries(off) == 2 * report.block_entries(config)
    refuse_mixed_groups(kv_cache_config(ONE), off)
