"""Every method by name (`registry`), and what they share: the choice of entries (`choice`)."""

from vllm_kvselect.methods.choice import (
    NO_TWINS,
    Retention,
    Twins,
    needs_values,
    retain,
    retain_layer,
    retain_pool,
    score_layer,
)
from vllm_kvselect.methods.registry import METHODS, Accumulator, Method, Scorer

__all__ = [
    "METHODS",
    "NO_TWINS",
    "Accumulator",
    "Method",
    "Retention",
    "Scorer",
    "Twins",
    "needs_values",
    "retain",
    "retain_layer",
    "retain_pool",
    "score_layer",
]
