"""What the package's own methods retain of a captured prompt. No second implementation of them."""

from typing import NamedTuple

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.evaluation.capture import Layer
from vllm_kvselect.methods import METHODS, Retention, retain
from vllm_kvselect.retention import RetentionPlan, plan
from vllm_kvselect.selection import stage_1_mask


class Prompt(NamedTuple):
    """A captured prompt and how to look at it.

    Attributes:
        layers: Captured from the prompt and from what follows it.
        num_tokens: Length of the prompt.
        block_size: Tokens per block: 1 counts a budget in entries as papers do, 32 is the engine's.
        what_if: `foresight` scores by the queries that follow the prompt instead of by the
            window's; `equal-norms` makes all value norms equal. See `AnalysisConfig`.
    """

    layers: list[Layer]
    num_tokens: int
    block_size: int
    what_if: str | None = None


def retained_entries(prompt: Prompt, config: EvictionConfig) -> torch.Tensor:
    """Chooses in every layer by itself, each from the full cache's queries, keys and values.

    Args:
        prompt: The prompt.
        config: Method, budget and parameters.

    Returns:
        `[num_layers, num_kv_heads, num_prompt_tokens]` bool. All of it if the budget covers it.
    """
    retained = tail_entries(prompt, config)
    planned = plan(prompt.num_tokens, prompt.block_size, config)
    if planned is not None:
        scored = planned.tail_start * prompt.block_size
        for index, layer in enumerate(prompt.layers):
            chosen = retained.new_zeros(retained.shape[1] * scored)
            chosen[_choose(prompt, layer, planned, config).retained] = True
            retained[index, :, :scored] = chosen.view(-1, scored)
    return retained


def stage_1_entries(prompt: Prompt, config: EvictionConfig) -> torch.Tensor:
    """Entries that the first stage of a method retains, the tail aside.

    Args:
        prompt: The prompt.
        config: Method, budget and parameters.

    Returns:
        `[num_layers, num_kv_heads, num_prompt_tokens]` bool. None of it if the budget covers it.
    """
    entries = torch.zeros_like(tail_entries(prompt, config))
    planned = plan(prompt.num_tokens, prompt.block_size, config)
    if planned is not None:
        scored = planned.tail_start * prompt.block_size
        for index, layer in enumerate(prompt.layers):
            pages = _choose(prompt, layer, planned, config).offsets.diff()
            scorer = METHODS[config.method].scorer
            scores = scorer(*_queries_and_keys(prompt, layer, config), layer.scale, config)
            entries[index, :, :scored] = stage_1_mask(
                scores[:, :scored], pages * prompt.block_size, config.alpha
            )
    return entries


def tail_entries(prompt: Prompt, config: EvictionConfig) -> torch.Tensor:
    """Entries that no method drops: from the tail on, or all if the budget covers the prompt.

    Args:
        prompt: The prompt.
        config: Budget and window.

    Returns:
        `[num_layers, num_kv_heads, num_prompt_tokens]` bool.
    """
    planned = plan(prompt.num_tokens, prompt.block_size, config)
    start = 0 if planned is None else planned.tail_start * prompt.block_size
    key = prompt.layers[0].key
    tail = torch.arange(prompt.num_tokens, device=key.device) >= start
    return tail.repeat(len(prompt.layers), key.shape[0], 1)


def _choose(
    prompt: Prompt, layer: Layer, planned: RetentionPlan, config: EvictionConfig
) -> Retention:
    query, key = _queries_and_keys(prompt, layer, config)
    value = layer.value[:, : planned.tail_start * prompt.block_size]
    return retain(
        query,
        key,
        torch.ones_like(value) if prompt.what_if == "equal-norms" else value,
        layer.output_projection,
        layer.scale,
        planned.num_packed,
        prompt.block_size,
        config,
    )


def _queries_and_keys(
    prompt: Prompt, layer: Layer, config: EvictionConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries that score, and all keys up to theirs."""
    if prompt.what_if == "foresight":
        return layer.query[prompt.num_tokens :], layer.key
    first = prompt.num_tokens - config.window
    return layer.query[first : prompt.num_tokens], layer.key[:, : prompt.num_tokens]
