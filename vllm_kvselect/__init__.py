"""KV cache eviction per attention head for stock vLLM, in vLLM's own block pool."""

__version__ = "0.1.0"
