"""Random scores: the baseline that every method must beat."""

from typing import TypeVar

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scorers import Draw
from vllm_kvselect.scoring.inputs import ScoringInputs

_MASK = 2**32 - 1
_T = TypeVar("_T", int, torch.Tensor)


def random_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Scores by a hash of seed, layer, head and position: the same on every device and run.

    So a preempted request retains the same entries when it is recomputed.

    Returns:
        `[num_kv_heads, num_tokens - window]`, float32 in [0, 1), multiples of 2**-24.
    """
    device = inputs.key.device
    per_layer = inputs.key.shape[0] // inputs.num_layers
    heads = torch.arange(inputs.key.shape[0], device=device)
    layers = heads // per_layer + inputs.layer_index
    places = torch.arange(inputs.num_scored, device=device)
    if inputs.num_absent is not None:
        places = (places - inputs.num_absent[:, None]).clamp_(min=0)
    of_head = _mix(_mix(_mix(config.of(Draw).seed) + layers) + heads % per_layer)
    return (_mix(of_head[:, None] + places) >> 8).to(torch.float32) / 2**24


def _mix(state: _T) -> _T:
    """Scrambles 32-bit numbers; the factor is below 2**31, so that int64 never overflows."""
    state = (state + 0x9E3779B9) & _MASK
    for _ in range(2):
        state = (((state >> 16) ^ state) * 0x45D9F3B) & _MASK
    return (state >> 16) ^ state
