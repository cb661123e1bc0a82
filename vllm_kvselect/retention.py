"""The retention plan: the integers that say which blocks become packed, tail or free.

Scheduler and workers compute it independently from the prompt's length and the configuration, so
they agree without a message. It never depends on scores.
"""

from math import ceil
from typing import NamedTuple

from vllm_kvselect.config import EvictionConfig


class RetentionPlan(NamedTuple):
    """Block indices into a request's block table, once its prompt is prefilled.

    `[0, first_packed)` is freed with its hashes intact, `[first_packed, tail_start)` are the
    packed blocks, and the tail blocks from `tail_start` on stay untouched.

    Attributes:
        first_packed: Index of the first packed block.
        num_packed: Number of packed blocks, at least 1.
        tail_start: Index of the first tail block, `first_packed + num_packed`.
    """

    first_packed: int
    num_packed: int
    tail_start: int


def plan(num_prompt_tokens: int, block_size: int, config: EvictionConfig) -> RetentionPlan | None:
    """Plans the retention of one prompt.

    The budget is met in whole blocks, rounded up: less is never retained than was asked for.

    Args:
        num_prompt_tokens: Length of the prompt in tokens.
        block_size: Tokens per block.
        config: The configuration; only `budget`, `window` and `method` matter here.

    Returns:
        The plan, or None when nothing would be freed (the request is then stock).
    """
    if not config.enabled:
        return None
    tail_start = (num_prompt_tokens - config.window) // block_size
    num_tail_entries = num_prompt_tokens - tail_start * block_size
    num_packed = max(
        1, -((num_tail_entries - budget_entries(num_prompt_tokens, config)) // block_size)
    )
    if tail_start <= num_packed:
        return None
    return RetentionPlan(tail_start - num_packed, num_packed, tail_start)


def budget_entries(num_prompt_tokens: int, config: EvictionConfig) -> int:
    """Returns the budget of a prompt in entries per KV head per layer."""
    if isinstance(config.budget, float):
        return ceil(config.budget * num_prompt_tokens)
    return config.budget
