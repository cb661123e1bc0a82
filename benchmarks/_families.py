"""Families of models as tiny configurations: what `models.py` tries.

Nothing is downloaded. A configuration is transformers' own of that name, with few layers, small
sizes and, where the family has them, its particulars: sliding windows, sinks, experts.
"""

from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 512
HIDDEN = 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    # Large enough for attention to have favourites, so that it matters what is dropped.
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SHAPE: dict[str, Any] = {
    **COMMON,
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
EVERY_HEAD = {"num_key_value_heads": 4}
SLIDING = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
SMALL_STATES = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
"""A block is as large as a state, and the prompt is short."""

GEMMA_4 = {
    **SLIDING,
    "global_head_dim": 64,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCABULARY,
}
MAMBA_2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
UNCACHED = {"enable_prefix_caching": False}
"""vLLM's CPU code of Mamba 2 has no states inside a chunk."""


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        name: For people.
        model_type: transformers' name of the configuration.
        particulars: What is added to `base`, or replaces it.
        base: Sizes by the names that the configuration has for them.
        architecture: Class of a model for which no checkpoint is made; only the start is tried,
            with vLLM's dummy weights, which is enough for what must be refused.
        engine: Further arguments of vLLM.
        why_untried: Where no configuration can be made: the reason.
        dtype: In which it is served: float32 but where vLLM has another one alone.
    """

    name: str
    model_type: str
    particulars: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=SHAPE.copy)
    architecture: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    why_untried: str = ""
    dtype: str = "float32"

    @property
    def config(self) -> dict[str, Any]:
        """Arguments of the configuration."""
        return self.base | self.particulars


GPT2_SHAPE = {"n_embd": HIDDEN, "n_layer": 4, "n_head": 4, "n_inner": HIDDEN, "n_positions": 2048}
FALCON_SHAPE = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "new_decoder_architecture": True,
}
STATE_SPACE = {"hidden_size": HIDDEN, "num_hidden_layers": 4}

FAMILIES = (
    Family("Llama", "llama"),
    Family("Llama by the Transformers backend", "llama", engine={"model_impl": "transformers"}),
    Family("Mistral", "mistral", {"sliding_window": None}),
    Family("Qwen 2", "qwen2"),
    Family("Qwen 3", "qwen3"),
    Family("SmolLM 3", "smollm3"),
    Family("Gemma 1", "gemma"),
    Family("Gemma 2", "gemma2", {**SLIDING, "query_pre_attn_scalar": 32}),
    Family("Gemma 3", "gemma3_text", {**SLIDING, "query_pre_attn_scalar": 32}),
    Family("Phi-3, Phi-4", "phi3"),
    Family("Granite 3", "granite"),
    Family("OLMo 2", "olmo2"),
    Family("StarCoder 2", "starcoder2"),
    Family("StableLM", "stablelm"),
    Family("Nemotron", "nemotron"),
    Family("GLM-4", "glm4"),
    Family("Cohere Command R", "cohere"),
    Family("Cohere Command R7B", "cohere2", SLIDING),
    Family("EXAONE 4", "exaone4", SLIDING),
    Family("Falcon", "falcon", FALCON_SHAPE, COMMON),
    Family("GPT-NeoX, Pythia", "gpt_neox", EVERY_HEAD),
    Family("GPT-2", "gpt2", GPT2_SHAPE, COMMON),
    Family("GPT-J", "gptj", {**GPT2_SHAPE, "rotary_dim": 16}, COMMON),
    Family(
        "OPT",
        "opt",
        {"ffn_dim": HIDDEN, "word_embed_proj_dim": HIDDEN, "init_std": 0.1, "pad_token_id": 1},
    ),
    Family("Persimmon", "persimmon", EVERY_HEAD),
    Family("Bloom", "bloom", {"n_head": 4, "n_layer": 4}),
    Family(
        "MPT",
        "mpt",
        {"d_model": HIDDEN, "n_heads": 4, "n_layers": 4, "max_seq_len": 2048},
        COMMON,
    ),
    Family("Mixtral", "mixtral", {"num_local_experts": 4}),
    Family("Qwen 2 MoE", "qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    Family("Qwen 3 MoE", "qwen3_moe", EXPERTS),
    Family("OLMoE", "olmoe", EXPERTS),
    Family("Granite MoE", "granitemoe", {"num_local_experts": 4}),
    Family("gpt-oss", "gpt_oss", {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Family(
        "DeepSeek V2",
        "deepseek_v2",
        {"kv_lora_rank": 32, "q_lora_rank": 32, "n_routed_experts": 4, "num_experts_per_tok": 2},
        architecture="DeepseekV2ForCausalLM",
    ),
    Family(
        "Llama 4",
        "llama4_text",
        {"layer_types": ["chunked_attention", "full_attention"] * 2, "num_local_experts": 4},
        architecture="Llama4ForCausalLM",
    ),
    Family(
        "Gemma 3n",
        "gemma3n_text",
        {**SLIDING, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY},
    ),
    Family("Gemma 4", "gemma4_text", {**GEMMA_4, "num_kv_shared_layers": 0}),
    Family("Gemma 4 E2B, E4B", "gemma4_text", {**GEMMA_4, "num_kv_shared_layers": 2}),
    Family(
        "LFM2",
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_dim": HIDDEN,
            "block_dim": HIDDEN,
            "block_ff_dim": HIDDEN,
            "block_multiple_of": 64,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    Family(
        "Granite 4 H",
        "granitemoehybrid",
        {
            **MAMBA_2,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": HIDDEN,
            "position_embedding_type": "nope",
            "attention_multiplier": 32**-0.5,
        },
        engine=UNCACHED,
    ),
    Family("Falcon-H1", "falcon_h1", {**MAMBA_2, "mamba_d_ssm": 256}, engine=UNCACHED),
    Family(
        "Nemotron-H",
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention"] * 2,
            "mamba_num_heads": 4,
            "mamba_head_dim": 64,
            "ssm_state_size": 32,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 64,
            "expand": 2,
        },
        {key: size for key, size in SHAPE.items() if key != "num_hidden_layers"},
        engine=UNCACHED,
    ),
    Family("Qwen 3 Next", "qwen3_next", {**EXPERTS, **LINEAR, **SMALL_STATES}, dtype="bfloat16"),
    # Refused where torchvision does not load, which vLLM's class of it needs.
    Family("Qwen 3.5", "qwen3_5_text", {**LINEAR, **SMALL_STATES}, dtype="bfloat16"),
    Family("Mamba", "mamba", STATE_SPACE, COMMON, architecture="MambaForCausalLM"),
    Family(
        "Mamba 2",
        "mamba2",
        {**STATE_SPACE, "num_heads": 8, "head_dim": 32},
        COMMON,
        architecture="Mamba2ForCausalLM",
    ),
    Family(
        "Jamba",
        "jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1},
        architecture="JambaForCausalLM",
    ),
    Family("Bamba", "bamba", {"attn_layer_indices": [1, 3]}, architecture="BambaForCausalLM"),
    Family("Whisper", "whisper", base=COMMON, architecture="WhisperForConditionalGeneration"),
    Family(
        "Qwen 3 as an embedding model",
        "qwen3",
        architecture="Qwen3ForCausalLM",
        engine={"runner": "pooling"},
    ),
    Family("BERT", "bert", architecture="BertModel"),
    Family(
        "InternLM 2",
        "internlm2",
        why_untried="its configuration is code in the model's repository, not in a package",
    ),
    Family(
        "Models of images and sounds",
        "",
        why_untried="their processors are files of the model's repository, not of a package",
    ),
)
