"""What the names in the registry stand for: its entries are plain data, these are the parts."""

from functools import cache
from pkgutil import resolve_name

from vllm_kvselect.scoring.inputs import Scorer


@cache
def scorer_named(name: str) -> Scorer:
    """The scorer that a name such as `snapkv:snapkv_scores` stands for."""
    found: Scorer = resolve_name(f"vllm_kvselect.scoring.{name}")
    return found
