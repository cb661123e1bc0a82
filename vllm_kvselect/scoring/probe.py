"""A linear probe of what is worth keeping: KVzap's idea (arXiv 2601.07891), on keys and values.

KVzap reads a token's hidden state. A token's key and value are linear maps of the normalised hidden
state, and they stay in the cache as long as the token does. A KV head's probe reads that head's
own: so a process that holds some of the heads needs nothing of the others.

Weights come from `vllm-kvselect calibrate`. A token's score depends on that token alone: it can be
scored at any cut, and no other token changes its score.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.inputs import ScoringInputs

PER_TOKEN = 2.0**-18
"""Added to a score's logarithm with every position.

In the first layer a token's vectors follow from the token alone. Equal tokens would tie there, and
rounding would decide; so the latest of them is kept.
"""

_BLOCK_ELEMENTS = 2**19
"""Features alive at once: 2 MiB in float32 stay in a processor's cache."""


def probe_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Scores entries by what the probe says of them.

    A token is scored when it first competes: its score is its number from then on. If the first
    entries were scored before, their scores come as numbers.

    Returns:
        `[num_kv_heads, n]` for those of the tokens before the window that values cover, at least
        float32.
    """
    return scores_with(probed_scores, inputs, config)


def scores_with(
    probed: Callable[[ScoringInputs, int], torch.Tensor],
    inputs: ScoringInputs,
    config: EvictionConfig,
) -> torch.Tensor:
    """The same by a twin of `probed_scores`."""
    end = min(inputs.key.shape[1] - config.window, inputs.value.shape[1])
    numbers, position = inputs.numbers, inputs.first_position
    begin = 0 if numbers is None else min(end, numbers.shape[1])
    scores = probed(_part(inputs, slice(begin, end)), position)
    return scores if numbers is None else torch.cat((numbers[:, :end], scores), dim=1)


def probed_scores(inputs: ScoringInputs, first_position: int) -> torch.Tensor:
    """What the probe says of neighbouring tokens: how much a repetition of the text needs each.

    Returns:
        `[num_kv_heads, num_tokens]`, at least float32; not negative, and comparable over heads and
        layers, as KVzip's score is.
    """
    assert inputs.probe is not None
    num_kv_heads, num_tokens, _ = inputs.key.shape
    dtype = torch.promote_types(inputs.key.dtype, torch.float32)
    weights = inputs.probe.to(dtype).T.unsqueeze(2)
    logarithms = inputs.key.new_empty(num_kv_heads, num_tokens, dtype=dtype)
    step = max(1, _BLOCK_ELEMENTS // inputs.probe.numel())
    for start in range(0, num_tokens, step):
        tokens = slice(start, min(start + step, num_tokens))
        features = probe_features(_part(inputs, tokens), first_position + start)
        logarithms[:, tokens] = torch.bmm(features, weights).squeeze(2)
    positions = torch.arange(num_tokens, dtype=dtype, device=logarithms.device) + first_position
    return logarithms.add_(positions, alpha=PER_TOKEN).exp_()


def probe_features(inputs: ScoringInputs, first_position: int = 0) -> torch.Tensor:
    """What a KV head's probe reads of neighbouring tokens.

    Returns:
        `[num_kv_heads, num_tokens, num_features]`, at least float32: the key before its rotation,
        the value, and the constant 1.
    """
    key = inputs.key
    if inputs.rotation is not None:
        key = inputs.rotation.undo(key, first_position)
    dtype = torch.promote_types(inputs.key.dtype, torch.float32)
    parts = [part.to(dtype) for part in (key, inputs.value)]
    return torch.cat((*parts, parts[0].new_ones(*key.shape[:2], 1)), dim=-1)


def num_features(head_size: int) -> int:
    """Weights of a KV head's probe, for a layer whose keys and values are of one size."""
    return 2 * head_size + 1


def _part(inputs: ScoringInputs, tokens: slice) -> ScoringInputs:
    """Keys and values of some tokens."""
    return replace(inputs, key=inputs.key[:, tokens], value=inputs.value[:, tokens])
