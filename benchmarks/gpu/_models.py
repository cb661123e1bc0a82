"""Models with random weights, made on the spot: nothing else is needed for speed and memory."""

import json
from pathlib import Path
from typing import Any

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
FOUR_LAYERS = {**LLAMA_8B, "num_hidden_layers": 4}
"""Starts in seconds, with layers of the same shape."""
TINY = {
    **LLAMA_8B,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
"""For a dry run on the processor."""


def write(folder: str, config: dict[str, Any]) -> str:
    """Writes a model's config into a folder, for `load_format="dummy"`."""
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder
