"""Models made on the spot, with a random probe each: nothing else is needed for speed and memory.

All but one have a config alone, for `load_format="dummy"`: vLLM fills them with weights of 1e-3.
Attention is 0.2 % of their residual stream, so what they answer hardly depends on what is dropped.
`loud` has weights with which it does.
"""

import json
from pathlib import Path
from typing import Any

import torch
from _device import HAS_CARD
from safetensors.torch import save_file

from vllm_kvselect.probes.file import ModelFacts, Probe, ProbeFacts, QualityFacts
from vllm_kvselect.probes.fingerprint import fingerprint

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
FOUR_LAYERS = {**LLAMA_8B, "num_hidden_layers": 4, "vocab_size": 4096}
MODELS: dict[str, dict[str, Any]] = {
    "8b": LLAMA_8B,
    "loud": {**FOUR_LAYERS, "intermediate_size": 4096},
    # Of LFM2 1.2B: six of 16 layers attend, the others are short convolutions.
    "hybrid": {
        **FOUR_LAYERS,
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "layer_types": [
            "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
        ],
        "head_dim": 64,
    },
    # Four layers of Qwen 3 30B-A3B's shape.
    "experts": {
        **FOUR_LAYERS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
}
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}
TINY = {**LLAMA_8B, **SMALL, "num_hidden_layers": 2}
SMALL_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SMALL_STATES = {"conv_dim": 128, "block_dim": 128, "block_ff_dim": 128, "block_multiple_of": 64}
"""Sizes on the processor."""


def config_of(kind: str) -> dict[str, Any]:
    """A model's config, small without a card."""
    config = MODELS[kind]
    if HAS_CARD:
        return config
    num_layers = 4 if kind == "hybrid" else 2
    small = {**config, **SMALL, "num_hidden_layers": num_layers}
    if kind == "hybrid":
        small |= {**SMALL_STATES, "layer_types": ["conv", "full_attention"] * 2}
    return {**small, **SMALL_EXPERTS} if kind == "experts" else small


def write(folder: str | Path, config: dict[str, Any], loud: bool = False) -> str:
    """Writes a model into a folder, and a random probe of it beside: `FOLDER.probe`."""
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    # Without weights there is something to take the fingerprint of all the same.
    weights = loud_weights(config) if loud else {"model.embed_tokens.weight": torch.ones(4, 4)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    kinds = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
    layers = tuple(index for index, kind in enumerate(kinds) if kind == "full_attention")
    facts = ModelFacts(
        name="random",
        fingerprint=fingerprint(str(folder)),
        num_layers=len(layers),
        num_kv_heads=config["num_key_value_heads"],
        head_size=config["head_dim"],
        layers=layers if "layer_types" in config else None,
    )
    none = QualityFacts(
        num_tokens=1, num_tokens_left_out=1, budgets=(1.0,), fitted=(0.0,), tuned=(0.0,)
    )
    random = torch.Generator().manual_seed(0)
    # Scores of a few units, whatever the size of keys and values; the last feature is a constant.
    probe = torch.randn(facts.shape, generator=random) * (0.05 if loud else 300.0)
    probe[:, -1] = 0.3 * torch.randn(probe[:, -1].shape, generator=random)
    made_by = ProbeFacts(written_by="the kit", model=facts, settings={}, quality=none)
    Probe(probe, made_by).save(Path(f"{folder}.probe"))
    return str(folder)


def loud_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights of a Llama whose tokens depend on attention as much as on themselves."""
    hidden, size = config["hidden_size"], config["head_dim"]
    query = config["num_attention_heads"] * size
    key = config["num_key_value_heads"] * size
    inner, vocabulary = config["intermediate_size"], config["vocab_size"]
    element = torch.bfloat16 if HAS_CARD else torch.float32
    random = torch.Generator().manual_seed(0)

    def randn(*shape: int, gain: float) -> torch.Tensor:
        return (torch.randn(shape, generator=random) * (gain / shape[-1] ** 0.5)).to(element)

    attention = {"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden)}
    attention["o_proj"] = (hidden, query)
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    found = {
        "model.embed_tokens.weight": randn(vocabulary, hidden, gain=hidden**0.5),
        "lm_head.weight": randn(vocabulary, hidden, gain=1.3),
        "model.norm.weight": torch.ones(hidden, dtype=element),
    }
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}"
        for part, gain, shapes in (("self_attn", 2.0, attention), ("mlp", 0.6, mlp)):
            for name, shape in shapes.items():
                found[f"{place}.{part}.{name}.weight"] = randn(*shape, gain=gain)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{place}.{name}.weight"] = torch.ones(hidden, dtype=element)
    return found


def bytes_of_a_token(config: dict[str, Any]) -> int:
    """In a KV cache of the model's own type, in all layers that attend."""
    kinds = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
    width = 2 * config["num_key_value_heads"] * config["head_dim"]
    return width * kinds.count("full_attention") * (2 if HAS_CARD else 4)
