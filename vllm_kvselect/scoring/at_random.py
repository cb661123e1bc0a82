"""Random scores: the baseline that every method must beat."""

from typing import TypeVar

import torch

from vllm_kvselect.config import EvictionConfig

_MASK = 2**32 - 1
_T = TypeVar("_T", int, torch.Tensor)


def random_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    config: EvictionConfig,
    layer_index: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores by a hash of seed, layer, head and position: the same on every device and run.

    So a preempted request retains the same entries when it is recomputed.

    Args:
        query: `[window, num_heads, head_size]`, only its length is read.
        key: `[num_kv_heads, num_prompt_tokens, head_size]`, only its shape is read.
        scale: Unused; every scorer has this signature.
        config: Gives `seed`.
        layer_index: The layer's place in the model.
        sinks: Unused.

    Returns:
        `[num_kv_heads, num_prompt_tokens - window]`, float32 in [0, 1), multiples of 2**-24.
    """
    num_kv_heads, num_prompt_tokens, _ = key.shape
    heads = torch.arange(num_kv_heads, device=key.device)
    positions = torch.arange(num_prompt_tokens - query.shape[0], device=key.device)
    of_head = _mix(_mix(_mix(config.seed) + layer_index) + heads)
    return (_mix(of_head[:, None] + positions) >> 8).to(torch.float32) / 2**24


def _mix(state: _T) -> _T:
    """Scrambles 32-bit numbers; the factor is below 2**31, so that int64 never overflows."""
    state = (state + 0x9E3779B9) & _MASK
    for _ in range(2):
        state = (((state >> 16) ^ state) * 0x45D9F3B) & _MASK
    return (state >> 16) ^ state
