"""Rotations found by use: what they undo is what each model's own projections gave."""

from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.offline.test_retained import make_config
from vllm_kvselect.offline.capture import capture
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.retained import Prompt, retained_entries
from vllm_kvselect.offline.rotations import UnknownRotation
from vllm_kvselect.scoring.rotation import Rotation

TOKEN_IDS = [(7 * index * index) % 61 for index in range(90)]
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}
HEAD_SIZE = 8


def yarn(factor: float = 4.0) -> dict[str, Any]:
    original = {"original_max_position_embeddings": 64}
    return {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": factor, **original}


FOUND = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE), 8, False),
    "yarn, which stretches": (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE, rope_parameters=yarn()),
        8,
        False,
    ),
    "cohere, neighbours": (CohereForCausalLM, CohereConfig(**SHAPE), 8, True),
    "glm, half of the neighbours": (
        GlmForCausalLM,
        GlmConfig(**SHAPE, head_dim=HEAD_SIZE),
        4,
        True,
    ),
    "phi, a part": (PhiForCausalLM, PhiConfig(**SHAPE), 4, False),
    "qwen3, normalised before": (
        Qwen3ForCausalLM,
        Qwen3Config(**SHAPE, head_dim=HEAD_SIZE),
        8,
        False,
    ),
}


def before_rotation(model: PreTrainedModel, name: str) -> list[torch.Tensor]:
    """What modules of a name give, `[num_tokens, num_heads, head_size]` a layer."""
    found: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, __, output: found.append(output))
        for key, module in model.named_modules()
        if key.endswith(name)
    ]
    with torch.no_grad():
        model(torch.tensor([TOKEN_IDS]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return [each.view(len(TOKEN_IDS), -1, HEAD_SIZE) for each in found]


def random_model(kind: Any, config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = kind(config).eval()
    model.set_attn_implementation("sdpa")
    return model


@pytest.mark.parametrize("name", FOUND)
def test_what_is_undone_is_what_was_projected(name: str) -> None:
    kind, config, size, interleaved = FOUND[name]
    model = random_model(kind, config)
    norm = "q_norm" if "qwen3" in name else "q_proj"
    expected, layers = before_rotation(model, norm), capture(model, TOKEN_IDS)
    assert len(expected) == len(layers) == 2
    for layer, query in zip(layers, expected, strict=True):
        rotation = layer.rotation
        assert isinstance(rotation, Rotation)
        assert rotation.cos.shape == rotation.sin.shape == (256, size // 2)
        assert rotation.interleaved is interleaved
        undone = rotation.undo(layer.query.transpose(0, 1)).transpose(0, 1)
        torch.testing.assert_close(undone, query, rtol=1e-3, atol=1e-4)
    assert not any(module._forward_hooks for module in model.modules())


def test_layers_without_positions_do_not_rotate() -> None:
    config = SmolLM3Config(**SHAPE, no_rope_layers=[1, 0])
    model = random_model(SmolLM3ForCausalLM, config)
    first, second = (layer.rotation for layer in capture(model, TOKEN_IDS))
    assert isinstance(first, Rotation)
    assert second is None


def test_tables_reach_beyond_a_prompt_that_the_model_is_not_made_for() -> None:
    config = LlamaConfig(**{**SHAPE, "max_position_embeddings": 16})
    layer, _ = capture(random_model(LlamaForCausalLM, config), TOKEN_IDS)
    assert isinstance(layer.rotation, Rotation)
    assert len(layer.rotation.cos) == len(TOKEN_IDS) + 1


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 128,
}
UNKNOWN = {
    "positions are added to the hidden states": (
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=64, n_positions=128, n_embd=32, n_layer=2, n_head=4, initializer_range=0.5
        ),
    ),
    "others for longer prompts": (
        Phi3ForCausalLM,
        Phi3Config(**SHAPE, original_max_position_embeddings=128, rope_parameters=LONG),
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_found_is_refused_by_methods_that_need_it_only(name: str) -> None:
    layers = capture(random_model(*UNKNOWN[name]), TOKEN_IDS)
    assert all(isinstance(layer.rotation, UnknownRotation) for layer in layers)
    prompt = Prompt(layers, 80, block_size=1)
    assert not retained_entries(prompt, make_config("keydiff")).all()
    with pytest.raises(EvaluationError, match=r"expected-attention needs queries as they were"):
        retained_entries(prompt, make_config("expected-attention"))
