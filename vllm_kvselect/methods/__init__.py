"""Every method by name (`registry`), and what they share: the choice of entries (`choice`)."""

from vllm_kvselect.methods.choice import Retention, retain, retain_pool, score_layer
from vllm_kvselect.methods.registry import METHODS, Method

__all__ = ["METHODS", "Method", "Retention", "retain", "retain_pool", "score_layer"]
