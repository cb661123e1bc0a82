"""Every method by name (`registry`), and what they share: the choice of entries (`choice`)."""

from vllm_kvselect.methods.choice import (
    Retention,
    needs_values,
    retain,
    retain_layer,
    retain_pool,
    score_layer,
)
from vllm_kvselect.methods.registry import METHODS, Accumulator, Method

__all__ = [
    "METHODS",
    "Accumulator",
    "Method",
    "Retention",
    "needs_values",
    "retain",
    "retain_layer",
    "retain_pool",
    "score_layer",
]
