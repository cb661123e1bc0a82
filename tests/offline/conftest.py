"""Random models of a few thousand weights; the words come from the small model's tokenizer."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vllm_kvselect.tiny_model import tiny_model

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, HIDDEN_SIZE = 2, 4, 2, 8, 24


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model())


@pytest.fixture(scope="session")
def llama(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Large weights, so that attention is far from even."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_SIZE,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def llama_folder(
    llama: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text = "The quick brown fox jumps over the lazy dog, and the dog looks up. " * 6
    return list(tokenizer.encode(text))[:96]
