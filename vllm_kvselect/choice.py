"""The choice of what is retained: score, rank, allocate, select."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels.base import REFERENCES, Allocator, Kernels
from vllm_kvselect.norms import FirstStage, SecondStage, Weights
from vllm_kvselect.registry import KNOWN_METHODS, Method
from vllm_kvselect.scorers import FirstTokens
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.parts import scorer_named
from vllm_kvselect.scoring.value_norms import OutputProjection, projected_value_l2_norms
from vllm_kvselect.selecting.allocation import pyramid_blocks
from vllm_kvselect.selecting.ranking import RANKINGS, Candidates
from vllm_kvselect.selecting.selection import stage_2_keys


class Retention(NamedTuple):
    """What a layer, or the layers of a pool, retain of one prompt, the tail blocks aside.

    Attributes:
        retained: Flat indices `head * num_tokens + token`, ascending,
            `[num_packed * num_kv_heads * block_size]` int64.
        offsets: Where each head's pages start in the run, `[num_kv_heads + 1]` int64.

    In a pool, `head` is `layer * num_kv_heads + head` and the heads of all layers are counted.
    """

    retained: torch.Tensor
    offsets: torch.Tensor


def retain(
    inputs: ScoringInputs,
    num_packed: int,
    block_size: int,
    config: EvictionConfig,
    kernels: Kernels = REFERENCES,
) -> Retention:
    """Scores, allocates and selects: the whole choice of one layer for one prompt.

    Args:
        inputs: Queries of the observation window (of the whole prompt for methods with
            `whole_prompt`), keys of the whole prompt, and values of the tokens before the tail:
            only these compete, the tail is retained anyway.
        num_packed: Packed blocks, fewer than the values' tokens fill.
        block_size: Entries per page.
        config: Method and parameters.
        kernels: What computes the parts.

    Returns:
        The retained entries and the heads' runs.
    """
    layer = score_layer(inputs, config, kernels)
    values, projection = inputs.value, inputs.output_projection
    return retain_layer(layer, values, projection, num_packed, block_size, config, kernels)


def needs_values(candidates: Candidates, config: EvictionConfig) -> bool:
    """Whether the second half of the choice still has to compute norms, and so needs values."""
    return KNOWN_METHODS[config.method].two_stages and candidates.norms is None


def retain_layer(
    candidates: Candidates,
    value: torch.Tensor | None,
    output_projection: OutputProjection | None,
    num_packed: int,
    block_size: int,
    config: EvictionConfig,
    kernels: Kernels = REFERENCES,
) -> Retention:
    """The second half of the choice, for a layer that shares its packed pages with no other.

    Args:
        candidates: What `score_layer` gave for the layer.
        value: As in `retain`; None will do unless `needs_values`.
        output_projection: Likewise.
        num_packed: As in `retain`, with what follows.
        block_size: Entries per page.
        config: Method and parameters.
        kernels: What computes the parts.

    Returns:
        The retained entries and the heads' runs.
    """

    def select_rest(budgets: torch.Tensor, num_retained: int) -> torch.Tensor:
        assert value is not None
        assert output_projection is not None
        return kernels.select_pruned(
            candidates.scores,
            candidates.stage_2,
            value,
            output_projection,
            budgets,
            num_retained,
            config.of(FirstStage).alpha,
            config.of(SecondStage).eps,
            candidates.num_absent,
        )

    layer = Candidates.stack([candidates])
    return _choose(layer, num_packed, block_size, config, kernels, select_rest)


def score_layer(
    inputs: ScoringInputs,
    config: EvictionConfig,
    kernels: Kernels = REFERENCES,
) -> Candidates:
    """The first half of the choice, which needs a layer's tensors.

    Args:
        inputs: As in `retain`.
        config: Method and parameters.
        kernels: What computes the parts.

    Returns:
        The layer's competing entries, `[num_kv_heads, num_tokens]` each. Norms are left out where
        they can be pruned once the budgets are known.
    """
    method, num_tokens = KNOWN_METHODS[config.method], inputs.value.shape[1]

    def scores_by(name: str, parameters: EvictionConfig) -> torch.Tensor:
        return kernels.scorer(scorer_named(name))(inputs, parameters)[:, :num_tokens]

    scores, weights, norms = scores_by(method.scores, config), None, None
    unpooled = config.of(Weights).stage_2_scores == "unpooled"
    if Weights in method.parameters and (method.weights or unpooled):
        stage_2 = config.model_copy(update={"kernel_size": 1}) if unpooled else config
        weights = scores_by(method.weights or method.scores, stage_2)
    if method.perturbation and (method.pooled or method.ranking != "score"):
        assert inputs.output_projection is not None
        quick = method.ranking == "product"
        norms_of = projected_value_l2_norms if quick else kernels.projected_value_norms
        norms = norms_of(inputs.value, inputs.output_projection).to(scores.dtype)
    return Candidates(scores, weights, norms, inputs.num_absent)


def retain_pool(
    candidates: Candidates,
    num_packed: int,
    block_size: int,
    config: EvictionConfig,
    kernels: Kernels = REFERENCES,
) -> Retention:
    """The second half, for all layers that share a request's packed pages.

    A pool of one layer gives what `retain` gives.

    Args:
        candidates: Stacked layers, `[num_layers, num_kv_heads, num_tokens]` each.
        num_packed: Packed blocks of the retention plan; each holds a page per layer and head.
        block_size: Entries per page.
        config: Method and parameters; the method is `pooled`.
        kernels: What computes the parts.

    Returns:
        `num_layers * num_packed * num_kv_heads * block_size` retained entries, and offsets
        `[num_layers * num_kv_heads + 1]` that run through the layers in order.
    """
    assert KNOWN_METHODS[config.method].pooled
    return _choose(candidates, num_packed, block_size, config, kernels, None)


def _choose(
    candidates: Candidates,
    num_packed: int,
    block_size: int,
    config: EvictionConfig,
    kernels: Kernels,
    without_norms: Callable[[torch.Tensor, int], torch.Tensor] | None,
) -> Retention:
    """Ranks, allocates and selects among stacked layers, their heads in one axis.

    Args:
        candidates: `[num_layers, num_kv_heads, num_tokens]` each.
        num_packed: Packed blocks.
        block_size: Entries per page.
        config: Method and parameters.
        kernels: What computes the parts.
        without_norms: `(budgets, num_retained)` -> retained entries, where `candidates` lacks the
            norms that the method needs.
    """
    method = KNOWN_METHODS[config.method]
    ranking = RANKINGS[method.ranking](candidates, num_packed * block_size, config)
    if candidates.num_absent is not None:
        # A blended floor could give a head more pages than it has entries.
        config = config.model_copy(update={"floor": "minimum"})
        ranking = candidates.without_absent(ranking)
    pages = _allocate(method, ranking, num_packed, block_size, config, kernels)
    budgets = pages * block_size
    num_retained = num_packed * budgets.shape[0] * block_size
    if needs_values(candidates, config):
        assert without_norms is not None
        retained = without_norms(budgets, num_retained)
    else:
        keys = _keys(method, candidates, ranking, budgets, config, kernels)
        retained = kernels.select(keys, budgets, num_retained)
    offsets = torch.zeros(budgets.shape[0] + 1, dtype=torch.int64, device=pages.device)
    torch.cumsum(pages, 0, out=offsets[1:])
    return Retention(retained, offsets)


def _keys(
    method: Method,
    candidates: Candidates,
    ranking: torch.Tensor,
    budgets: torch.Tensor,
    config: EvictionConfig,
    kernels: Kernels,
) -> torch.Tensor:
    """What entries are selected by, `[num_layers * num_kv_heads, num_tokens]`."""
    keys = ranking.flatten(0, 1)
    if not method.two_stages:
        return keys
    scores = candidates.without_absent(candidates.scores).flatten(0, 1)
    stage_1 = kernels.stage_1_mask(scores, budgets, config.of(FirstStage).alpha)
    if method.ranking != "score":
        return keys.masked_fill(stage_1, float("inf"))
    assert candidates.norms is not None
    weights, norms = (part.flatten(0, 1) for part in (candidates.stage_2, candidates.norms))
    keys = stage_2_keys(weights, norms, stage_1, config.of(SecondStage).eps)
    return candidates.without_absent(keys.view_as(candidates.scores)).flatten(0, 1)


def _allocate(
    method: Method,
    ranking: torch.Tensor,
    num_packed: int,
    block_size: int,
    config: EvictionConfig,
    kernels: Kernels,
) -> torch.Tensor:
    """Pages of every head of every layer, `[num_layers * num_kv_heads]`."""
    allocator: Allocator = getattr(kernels, method.allocator)
    if not method.scope.is_pyramid:
        heads = ranking.flatten(0, 1)
        if method.keeps_first_tokens and config.of(FirstTokens).num_sinks:
            heads = _first_pages_first(heads, block_size, kernels)
        return allocator(heads, num_packed, block_size, config)
    num_layers, _, num_tokens = ranking.shape
    blocks = pyramid_blocks(num_packed, num_layers, num_tokens // block_size, config)
    layers = zip(ranking, blocks, strict=True)
    return torch.cat([allocator(layer, n, block_size, config) for layer, n in layers])


def _first_pages_first(ranking: torch.Tensor, block_size: int, kernels: Kernels) -> torch.Tensor:
    """Puts each head's best page before all others.

    A head that wants little but its first tokens wants less than half a page. Rounded, that would
    be none, and the first tokens would go, to which every head attends.
    """
    counts = torch.full_like(ranking[:, 0], block_size, dtype=torch.int64)
    return ranking.masked_fill(kernels.stage_1_mask(ranking, counts, 1.0), float("inf"))
