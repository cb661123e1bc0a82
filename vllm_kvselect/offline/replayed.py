"""A prompt's replay, made once for all methods that ask for it."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.offline.capture import Layer
from vllm_kvselect.offline.kvzip import kvzip_scores
from vllm_kvselect.registry import KNOWN_METHODS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def replayed(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    layers: list[Layer],
    prompt: Sequence[int],
    evictions: Iterable[EvictionConfig],
) -> torch.Tensor | None:
    """KVzip's scores of a prompt if some method needs them.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        layers: Captured from the prompt, or from more that begins with it.
        prompt: Its token ids.
        evictions: The methods.

    Returns:
        `[num_layers, num_kv_heads, num_tokens]`, or None where no method asks.
    """
    if not any(each.enabled and KNOWN_METHODS[each.method].scorer.replay for each in evictions):
        return None
    return kvzip_scores(model, tokenizer, layers, list(prompt))
