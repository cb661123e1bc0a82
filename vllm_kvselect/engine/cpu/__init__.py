"""vLLM's CPU worker and attention, with the one-head view."""
