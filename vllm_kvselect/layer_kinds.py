"""Kinds of layers, as configs name them."""

STATES = frozenset({"conv", "linear_attention", "mamba"})
"""Layers that keep a state in place of keys and values."""
WITHOUT_ATTENTION = STATES | {"mlp", "moe"}
"""Layers that do not attend: those with nothing to keep among them."""
HYBRID = "hybrid"
"""A layer that attends and keeps a state beside it."""
