"""Tiny checkpoints with random weights of models that have other layers beside full attention."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.engine.random_models import SHAPE

_STATES: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}


def lfm2() -> PreTrainedModel:
    """Two layers of short convolutions before each of two with attention."""
    config = Lfm2Config(
        num_hidden_layers=6,
        layer_types=["conv", "conv", "full_attention"] * 2,
        conv_L_cache=3,
        conv_dim=256,
        block_dim=256,
        block_ff_dim=256,
        block_multiple_of=64,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        **SHAPE,
    )
    return Lfm2ForCausalLM(config)


def gemma4(num_sharing_layers: int = 0) -> PreTrainedModel:
    """Two layers with a sliding window before each of two with larger heads, which have none.

    Args:
        num_sharing_layers: Three, or none, behind these: they read the caches of the last layers of
            their kinds.
    """
    num_layers = 6 + num_sharing_layers
    config = Gemma4TextConfig(
        num_hidden_layers=num_layers,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"]
        * (num_layers // 3),
        sliding_window=64,
        global_head_dim=64,
        num_global_key_value_heads=4,
        num_kv_shared_layers=num_sharing_layers,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=SHAPE["vocab_size"],
        **SHAPE,
    )
    return Gemma4ForCausalLM(config)


def granite_h() -> PreTrainedModel:
    """A layer of state space before each of two with attention, which knows no positions."""
    config = GraniteMoeHybridConfig(
        num_hidden_layers=4,
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=0,
        shared_intermediate_size=256,
        position_embedding_type="nope",
        attention_multiplier=SHAPE["head_dim"] ** -0.5,
        **_STATES,
        **SHAPE,
    )
    return GraniteMoeHybridForCausalLM(config)


def falcon_h1() -> PreTrainedModel:
    """Attention and state space side by side in each of two layers."""
    sizes = {**_STATES, "mamba_d_ssm": 512}
    return FalconH1ForCausalLM(FalconH1Config(num_hidden_layers=2, **sizes, **SHAPE))


def nemotron_h() -> PreTrainedModel:
    """State space, a perceptron and attention, twice, each a layer of its own."""
    config = NemotronHConfig(
        layers_block_type=["mamba", "mlp", "attention"] * 2,
        mamba_num_heads=8,
        mamba_head_dim=64,
        ssm_state_size=32,
        n_groups=1,
        conv_kernel=4,
        chunk_size=64,
        expand=2,
        **{**SHAPE, "initializer_range": 0.07},  # squares of large activations round badly
    )
    return NemotronHForCausalLM(config)


def qwen3_next() -> PreTrainedModel:
    """Two layers of linear attention before each of two with attention behind a gate."""
    config = Qwen3NextConfig(
        num_hidden_layers=6,
        layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=2,
        num_experts_per_tok=2,  # which one a token takes would hang on roundings
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        **{**SHAPE, "initializer_range": 0.05},  # it is served in bfloat16 alone
    )
    return Qwen3NextForCausalLM(config)


def mended_lfm2_attention(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> Any:
    """vLLM's `Lfm2Attention.forward`, as it is meant.

    On CPU its norm takes rows that are apart for neighbours, and its rotation heads for tokens.
    """
    sizes = [self.q_size, self.kv_size, self.kv_size]
    query, key, value = self.qkv_proj(hidden_states)[0].split(sizes, dim=-1)
    query, key = (part.unflatten(-1, (-1, self.head_dim)) for part in (query, key))
    query, key = self.q_layernorm(query.contiguous()), self.k_layernorm(key.contiguous())
    query, key = self.rotary_emb(positions, query.flatten(1), key.flatten(1))
    return self.out_proj(self.attn(query, key, value))[0]


def saved(
    make: Callable[[], PreTrainedModel], folder: Path, dtype: torch.dtype = torch.float32
) -> Path:
    """Makes a model and saves it; norms are not all alike."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(1.0, 0.1)
    model.to(dtype).save_pretrained(folder)
    return folder
