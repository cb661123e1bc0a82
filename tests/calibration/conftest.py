"""The random model of the offline room's tests."""

from tests.offline.conftest import llama, llama_folder, token_ids, tokenizer

__all__ = ["llama", "llama_folder", "token_ids", "tokenizer"]
