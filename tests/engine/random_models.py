"""Tiny checkpoints with random weights, in float32: shapes that the small model does not have.

Weights are large enough for attention to have favourites, so that it matters what is dropped.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PersimmonConfig,
    PersimmonForCausalLM,
)

VOCAB_SIZE = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def random_llama(folder: Path) -> Path:
    """Four layers of four KV heads, which divide by two."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **SHAPE)).save_pretrained(folder)
    return folder


def random_gemma3(folder: Path) -> Path:
    """Two layers with full attention, each after two with a sliding window of 64 tokens."""
    torch.manual_seed(0)
    layer_types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    window = {"layer_types": layer_types, "sliding_window": 64, "query_pre_attn_scalar": 32}
    model = Gemma3ForCausalLM(Gemma3TextConfig(num_hidden_layers=6, **window, **SHAPE))
    with torch.no_grad():
        # Gemma scales embeddings up and has them predict tokens too: smaller, or it would repeat.
        model.model.embed_tokens.weight.mul_(0.2)
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.normal_(1.0 if "q_norm" in name or "k_norm" in name else 0.0, 0.1)
    model.save_pretrained(folder)
    return folder


def random_gpt_oss(folder: Path, **shape: int) -> Path:
    """A sliding window of 64 tokens in every other layer, sinks in all, four experts."""
    torch.manual_seed(0)
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 1.0, "truncate": False}
    lengths = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
    config = GptOssConfig(
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=rope | lengths,
        **SHAPE | shape,
    )
    model = GptOssForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.normal_(4.0, 2.0)
            elif "bias" in name:
                weight.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return folder


def random_persimmon(folder: Path) -> Path:
    """Two layers that vLLM runs through transformers; each attention head has its own KV head."""
    torch.manual_seed(0)
    own = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    sizes = {key: size for key, size in SHAPE.items() if key not in own}
    config = PersimmonConfig(num_hidden_layers=2, max_position_embeddings=512, **sizes)
    PersimmonForCausalLM(config).save_pretrained(folder)
    return folder


def random_prompts(lengths: list[int]) -> list[list[int]]:
    """Prompts of random tokens, one of each length.

    A prompt has no token twice until it has had all: in the first layer nothing but the token tells
    entries apart where positions are undone, and rounding would decide between equal ones.
    """
    torch.manual_seed(1)
    prompts = []
    for length in lengths:
        rounds = [torch.randperm(VOCAB_SIZE) for _ in range(-(-length // VOCAB_SIZE))]
        prompts.append(torch.cat(rounds)[:length].tolist())
    return prompts
