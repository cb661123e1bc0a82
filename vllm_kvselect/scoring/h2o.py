"""H2O (arXiv 2306.14048): the attention that an entry has gathered from the whole prompt."""

from dataclasses import replace

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.inputs import Scorer, ScoringInputs
from vllm_kvselect.scoring.observer import Observer, Twins
from vllm_kvselect.scoring.snapkv import window_attention

_BLOCK_ELEMENTS = 2**22
"""Attention weights alive at once, 16 MiB in float32: memory does not grow with the prompt."""


def h2o_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Scores every entry before the window by its accumulated attention.

    The sum over all queries so far that see the entry, the mean over the query group.

    Args:
        inputs: Queries and keys of the *whole* prompt; or what was received, in rounds.
        config: Gives `window`.

    Returns:
        `[num_kv_heads, num_tokens - window]`, at least float32.
    """
    sums = accumulate(inputs) if inputs.received is None else inputs.received
    return sums[:, : inputs.key.shape[1] - config.window]


def accumulate(inputs: ScoringInputs) -> torch.Tensor:
    """Attention that a chunk of queries pays to every key so far, absent ones left out.

    Additive: the sums of a prompt's chunks, each padded with zeros to the prompt's length, add up
    to those of the whole prompt. Blocked over queries, so that memory stays bounded.

    Args:
        inputs: Queries of the chunk, and keys from the prompt's first token to the chunk's end.

    Returns:
        `[num_kv_heads, num_tokens]`, at least float32: summed over the chunk's queries, averaged
        over the query group.
    """
    num_queries, num_heads, _ = inputs.query.shape
    num_kv_heads, num_tokens, _ = inputs.key.shape
    dtype = torch.promote_types(inputs.key.dtype, torch.float32)
    total = torch.zeros(num_kv_heads, num_tokens, dtype=dtype, device=inputs.key.device)
    step = max(1, _BLOCK_ELEMENTS // (num_heads * num_tokens))
    for start in range(0, num_queries, step):
        stop = min(start + step, num_queries)
        seen = inputs.num_scored + stop
        part = replace(inputs, query=inputs.query[start:stop], key=inputs.key[:, :seen])
        total[:, :seen] += window_attention(part).sum(dim=1)
    return total.div_(num_heads // num_kv_heads)


class AttentionSums(Observer):
    """The sums, added up chunk by chunk."""

    whole_prompt = True
    reads_earlier_keys = True
    _sums: torch.Tensor | None = None

    @property
    def first_position(self) -> int:
        """The prompt's first token."""
        return 0

    def _observe(self, inputs: ScoringInputs, first_position: int, twin: Twins) -> None:
        added = accumulate(inputs)
        if self._sums is None:
            self._sums = added.new_zeros(self.num_layers, len(added), self.num_tokens)
        self._sums[inputs.layer_index, :, : added.shape[1]] += added

    @property
    def sums(self) -> torch.Tensor:
        """The sums of all layers, `[num_layers, num_kv_heads, num_tokens]`."""
        assert self._sums is not None
        return self._sums

    def scores(self, inputs: ScoringInputs, scorer: Scorer, config: EvictionConfig) -> torch.Tensor:
        """The sums of what `h2o_scores` would add up at once; see `Observer.scores`."""
        return self.sums[inputs.layer_index, :, : self.num_tokens - config.window]
