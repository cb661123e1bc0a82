"""Tiny checkpoints with random weights, in float32: shapes that the small model does not have.

Weights are large enough for attention to have favourites, so that it matters what is dropped.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PaddleOCRVLConfig,
    PersimmonConfig,
    PersimmonForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
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


def random_llama(folder: Path, num_layers: int = 4) -> Path:
    """Four layers of four KV heads, which divide by two."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers, **SHAPE)).save_pretrained(folder)
    return folder


def with_positions_of_several_parts(folder: Path) -> Path:
    """Makes a `random_llama` the language model of one that sees images (M-RoPE).

    Its weights are the same and it has none for images: serve it with `language_model_only`.
    """
    text = json.loads((folder / "config.json").read_text())
    del text["architectures"], text["model_type"]
    text["rope_parameters"] |= {"mrope_section": [4, 6, 6]}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    tokens = ("image", "video", "vision_start", "vision_end")
    config = PaddleOCRVLConfig(
        text_config=text,
        vision_config={"num_hidden_layers": 1, **sizes},
        architectures=["PaddleOCRVLForConditionalGeneration"],
        tie_word_embeddings=False,
        **{f"{token}_token_id": place for place, token in enumerate(tokens)},
    )
    config.save_pretrained(folder)
    return folder


def random_eagle(folder: Path, num_hidden_states: int = 1) -> Path:
    """A layer that drafts from the hidden states of a `random_llama`.

    Args:
        folder: Where to put it.
        num_hidden_states: From how many layers these are: from the last one for EAGLE, three for
            EAGLE3, which has embeddings beside them in its attention.
    """
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=1, draft_vocab_size=VOCAB_SIZE, **SHAPE)
    layer = LlamaForCausalLM(config).model.layers[0].state_dict()
    width, is_eagle3 = config.hidden_size, num_hidden_states > 1
    num_inputs = num_hidden_states if is_eagle3 else 2
    weights = {"fc.weight": torch.randn(width, num_inputs * width) * 0.1}
    if is_eagle3:
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = layer[f"self_attn.{name}.weight"]
            layer[f"self_attn.{name}.weight"] = torch.cat([weight, weight.flip(0)], dim=1)
        layer["hidden_norm.weight"] = torch.ones(width)
        weights["norm.weight"] = torch.ones(width)
        weights["lm_head.weight"] = torch.randn(VOCAB_SIZE, width) * 0.1
    else:
        del layer["input_layernorm.weight"]  # it has none
    place = "midlayer" if is_eagle3 else "layers.0"
    weights |= {f"{place}.{name}": weight.contiguous() for name, weight in layer.items()}
    config.architectures = ["LlamaForCausalLMEagle3" if is_eagle3 else "EagleLlamaForCausalLM"]
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
    return folder


def random_mimo(folder: Path, num_layers: int = 4) -> Path:
    """Layers of Qwen 2 and one that drafts from their hidden states (MTP)."""
    torch.manual_seed(0)
    config = Qwen2Config(num_hidden_layers=num_layers, num_nextn_predict_layers=1, **SHAPE)
    weights = Qwen2ForCausalLM(config).state_dict()
    layer = Qwen2ForCausalLM(config).model.layers[0].state_dict()
    width = config.hidden_size
    layer |= {
        f"{name}_layernorm.weight": torch.ones(width) for name in ("token", "hidden", "final")
    }
    layer["input_proj.weight"] = torch.randn(width, 2 * width) * 0.1
    weights |= {f"model.mtp_layers.0.{name}": weight for name, weight in layer.items()}
    config.architectures = ["MiMoForCausalLM"]
    config.save_pretrained(folder)
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        folder / "model.safetensors",
    )
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
