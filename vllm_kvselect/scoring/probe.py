"""A linear probe that imitates a costly score: KVzap's idea (arXiv 2601.07891), on q, k and v.

KVzap reads a token's hidden state. A token's query, key and value are linear maps of the normalised
hidden state, and the attention layer has them at hand. A KV head's probe reads what belongs to that
head: its query group, its key and its value. So a process that holds some of the heads needs
nothing of the others.

Weights come from `vllm-kvselect calibrate`. A token's score depends on that token alone: a prompt
can be scored chunk by chunk, while it grows, and no later token changes a score.
"""

from dataclasses import replace

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.inputs import Scorer, ScoringInputs
from vllm_kvselect.scoring.observer import Observer, Twins

PER_TOKEN = 2.0**-18
"""Added to a score's logarithm with every position.

In the first layer a token's vectors follow from the token alone. Equal tokens would tie there, and
rounding would decide; so the latest of them is kept.
"""

_BLOCK_ELEMENTS = 2**19
"""Features alive at once: 2 MiB in float32 stay in a processor's cache."""


def probe_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Scores entries by what the probe says of them, the first tokens above all others.

    Args:
        inputs: Queries, keys and values from the prompt's first token on, rotation and probe.
        config: Gives `num_sinks` and `window`.

    Returns:
        `[num_kv_heads, n]` for those of the tokens before the window that values cover, at least
        float32. Infinity for the first `num_sinks`, which no head drops.
    """
    num_tokens = min(inputs.key.shape[1] - config.window, inputs.value.shape[1])
    competing = _part(inputs, slice(num_tokens))
    return _above_all(imitated_scores(competing, 0), config)


def imitated_scores(inputs: ScoringInputs, first_position: int) -> torch.Tensor:
    """What the probe says of every token: an estimate of the score that it imitates.

    Args:
        inputs: A chunk: queries, keys and values of the same tokens, rotation and probe.
        first_position: Position of its first token in the prompt.

    Returns:
        `[num_kv_heads, num_tokens]`, at least float32; not negative, and comparable over heads and
        layers as the score is that they imitate.
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


class ScoresOfTokens(Observer):
    """The scores themselves: once a token is seen, nothing else of it is needed.

    Those of a layer take a float for each KV head and token, until the layer is scored.
    """

    whole_prompt = True

    def __init__(self, num_tokens: int, num_layers: int, config: EvictionConfig) -> None:
        super().__init__(num_tokens, num_layers, config)
        self._scores: dict[int, torch.Tensor] = {}

    @property
    def first_position(self) -> int:
        """The prompt's first token."""
        return 0

    def _observe(self, inputs: ScoringInputs, first_position: int, twin: Twins) -> None:
        added = twin(imitated_scores)(inputs, first_position)
        if inputs.layer_index not in self._scores:
            shape = (len(added), self.num_tokens)
            self._scores[inputs.layer_index] = added.new_empty(shape)
        end = first_position + added.shape[1]
        self._scores[inputs.layer_index][:, first_position:end] = added

    def scores(self, inputs: ScoringInputs, scorer: Scorer, config: EvictionConfig) -> torch.Tensor:
        """Gives the scores; see `Observer.scores`. The rule is `probe_scores`."""
        num_scored = self.num_tokens - config.window
        return _above_all(self._scores[inputs.layer_index][:, :num_scored], config)

    def release(self, layer_index: int) -> None:
        """Gives a layer's scores back."""
        self._scores.pop(layer_index, None)


def probe_features(inputs: ScoringInputs, first_position: int = 0) -> torch.Tensor:
    """What a KV head's probe reads of every token.

    Args:
        inputs: A chunk: queries, keys and values of the same tokens, and the rotation.
        first_position: Position of its first token in the prompt.

    Returns:
        `[num_kv_heads, num_tokens, num_features]`, at least float32: the group's queries and the
        key, both before their rotation, the value, and the constant 1.
    """
    query, key = inputs.query.transpose(0, 1), inputs.key
    if inputs.rotation is not None:
        query = inputs.rotation.undo(query, first_position)
        key = inputs.rotation.undo(key, first_position)
    dtype = torch.promote_types(inputs.key.dtype, torch.float32)
    # [num_heads, num_tokens, head_size] -> [num_kv_heads, num_tokens, group * head_size]
    by_group = query.reshape(len(key), -1, *key.shape[1:])
    group = by_group.transpose(1, 2).flatten(2)
    parts = [part.to(dtype) for part in (group, key, inputs.value)]
    return torch.cat((*parts, parts[1].new_ones(*key.shape[:2], 1)), dim=-1)


def num_features(group: int, head_size: int) -> int:
    """Weights of a KV head's probe, for a layer whose keys and values are of one size."""
    return (group + 2) * head_size + 1


def _part(inputs: ScoringInputs, tokens: slice) -> ScoringInputs:
    """Some tokens of a chunk."""
    query, key, value = inputs.query[tokens], inputs.key[:, tokens], inputs.value[:, tokens]
    return replace(inputs, query=query, key=key, value=value)


def _above_all(scores: torch.Tensor, config: EvictionConfig) -> torch.Tensor:
    """Marks the first tokens: every head attends to them, whatever they say."""
    scores[:, : config.num_sinks] = float("inf")
    return scores
