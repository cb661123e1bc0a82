"""What the package's own methods retain of a captured prompt. No second implementation of them."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from vllm_kvselect.choice import Retention, retain, retain_pool, score_layer
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.norms import FirstStage
from vllm_kvselect.offline.capture import Layer
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.rotations import UnknownRotation
from vllm_kvselect.planning.cuts import Cut, cuts
from vllm_kvselect.registry import KNOWN_METHODS
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.rotation import Rotation
from vllm_kvselect.selecting.ranking import Candidates
from vllm_kvselect.selecting.selection import best_mask, stage_1_counts


class Prompt(NamedTuple):
    """A captured prompt and how to look at it.

    Attributes:
        layers: Captured from the prompt and from what follows it.
        num_tokens: Length of the prompt.
        block_size: Tokens per block: 1 counts a budget in entries as papers do, 32 is the engine's.
        what_if: `equal-norms` makes all value norms equal. See `AnalysisConfig`.
        kernels: What computes the parts of a choice.
        probe: The model's calibrated probe, `[num_layers, num_features, num_kv_heads]`, for methods
            that need it.
        replayed: KVzip's scores of the prompt, `[num_layers, num_kv_heads, num_prompt_tokens]`, for
            methods that need them.
    """

    layers: list[Layer]
    num_tokens: int
    block_size: int
    what_if: str | None = None
    kernels: Kernels = REFERENCES
    probe: torch.Tensor | None = None
    replayed: torch.Tensor | None = None


def retained_entries(prompt: Prompt, config: EvictionConfig) -> torch.Tensor:
    """Chooses from the full cache's queries, keys and values of every layer.

    Args:
        prompt: The prompt.
        config: Method, budget and parameters.

    Returns:
        `[num_layers, num_kv_heads, num_prompt_tokens]` bool. All of it if the budget covers it.

    Raises:
        EvaluationError: If the method needs the layers' rotations, and they are not known.
    """
    retained = tail_entries(prompt, config)
    cut = _cut(prompt, config)
    if cut is not None:
        scored = cut.tail_start * prompt.block_size
        for layers, retention in _choose(prompt, cut, config):
            chosen = retained[layers, :, :scored].flatten()
            chosen[retention.retained] = True
            retained[layers, :, :scored] = chosen.view(-1, retained.shape[1], scored)
    return retained


def stage_1_entries(prompt: Prompt, config: EvictionConfig) -> torch.Tensor:
    """Entries that the first stage of a method retains, the tail aside.

    Args:
        prompt: The prompt.
        config: Method, budget and parameters.

    Returns:
        `[num_layers, num_kv_heads, num_prompt_tokens]` bool. None of it if the budget covers it.

    Raises:
        EvaluationError: If the method has no two stages.
    """
    if not KNOWN_METHODS[config.method].two_stages:
        raise EvaluationError(f"{config.method} does not select in two stages")
    entries = torch.zeros_like(tail_entries(prompt, config))
    cut = _cut(prompt, config)
    if cut is not None:
        scored = cut.tail_start * prompt.block_size
        for layers, retention in _choose(prompt, cut, config):
            budgets = retention.offsets.diff() * prompt.block_size
            candidates = _score(prompt, layers, scored, config)
            of_stage_1 = stage_1_counts(budgets, config.of(FirstStage).alpha, config.num_first)
            scores = candidates.with_first(candidates.scores, config.num_first)
            first = best_mask(scores.flatten(0, 1), of_stage_1)
            entries[layers, :, :scored] = first.view_as(candidates.scores)
    return entries


def tail_entries(prompt: Prompt, config: EvictionConfig) -> torch.Tensor:
    """Entries that no method drops: from the tail on, or all if the budget covers the prompt.

    Args:
        prompt: The prompt.
        config: Budget and window.

    Returns:
        `[num_layers, num_kv_heads, num_prompt_tokens]` bool.
    """
    cut = _cut(prompt, config)
    start = 0 if cut is None else cut.tail_start * prompt.block_size
    key = prompt.layers[0].key
    tail = torch.arange(prompt.num_tokens, device=key.device) >= start
    return tail.repeat(len(prompt.layers), key.shape[0], 1)


def _cut(prompt: Prompt, config: EvictionConfig) -> Cut | None:
    """The cut that the prompt's last token makes, or an earlier one."""
    return cuts(prompt.num_tokens, prompt.block_size, config).last_made(prompt.num_tokens)


def _choose(prompt: Prompt, cut: Cut, config: EvictionConfig) -> Iterator[tuple[slice, Retention]]:
    """The choice of each layer, or of all layers where they share a pool; which layers it is of."""
    scored = cut.tail_start * prompt.block_size
    if KNOWN_METHODS[config.method].pooled:
        everything = slice(0, len(prompt.layers))
        candidates = _score(prompt, everything, scored, config)
        pool = (cut.num_packed, prompt.block_size, config, prompt.kernels)
        yield everything, retain_pool(candidates, *pool)
        return
    for index in range(len(prompt.layers)):
        inputs = _inputs(prompt, index, scored, config)
        sizes = (cut.num_packed, prompt.block_size)
        retention = retain(inputs, *sizes, config, prompt.kernels)
        yield slice(index, index + 1), retention


def _score(prompt: Prompt, layers: slice, scored: int, config: EvictionConfig) -> Candidates:
    chosen = []
    for index in range(len(prompt.layers))[layers]:
        inputs = _inputs(prompt, index, scored, config)
        chosen.append(score_layer(inputs, config, prompt.kernels))
    return Candidates.stack(chosen)


def _inputs(prompt: Prompt, index: int, scored: int, config: EvictionConfig) -> ScoringInputs:
    """What the methods read of a layer."""
    layer = prompt.layers[index]
    query, key = layer.query[: prompt.num_tokens], layer.key[:, : prompt.num_tokens]
    method = KNOWN_METHODS[config.method]
    if not method.scorer.whole_prompt:
        query = query[-config.window :]
    value = layer.value[:, :scored]
    if prompt.what_if == "equal-norms":
        value = torch.ones_like(value)
    return ScoringInputs(
        query,
        key,
        value,
        layer.scale,
        layer.output_projection,
        layer_index=index,
        rotation=_rotation(layer, config) if "rotation" in method.needs else None,
        probe=None if prompt.probe is None else prompt.probe[index].to(key.device),
        replayed=None if prompt.replayed is None else prompt.replayed[index],
    )


def _rotation(layer: Layer, config: EvictionConfig) -> Rotation | None:
    if isinstance(layer.rotation, UnknownRotation):
        raise EvaluationError(
            f"{config.method} needs queries as they were before their positions, and of this model "
            f"they are not known: {layer.rotation.reason}; leave this method out"
        )
    return layer.rotation
