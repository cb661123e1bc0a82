"""vLLM's CUDA worker and attention backends, with the one-head view."""
