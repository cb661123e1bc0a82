"""The only part that imports vLLM: how the pure modules meet its scheduler and its workers."""
