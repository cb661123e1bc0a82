"""The random model of the analysis's tests."""

from tests.analysis.conftest import llama, llama_folder, token_ids, tokenizer

__all__ = ["llama", "llama_folder", "token_ids", "tokenizer"]
