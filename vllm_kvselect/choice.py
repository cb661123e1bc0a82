"""The choice of what is retained: score, rank, allocate, select, in all layers at once."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels import rows
from vllm_kvselect.kernels.base import REFERENCES, Allocator, Kernels
from vllm_kvselect.norms import FirstStage, SecondStage, Weights
from vllm_kvselect.planning.cuts import first_pages
from vllm_kvselect.registry import KNOWN_METHODS, Method
from vllm_kvselect.scoring.held import Held
from vllm_kvselect.scoring.inputs import ScoringInputs, scorer_named
from vllm_kvselect.scoring.value_norms import projected_value_l2_norms, projected_value_norms
from vllm_kvselect.selecting.allocation import pyramid_blocks
from vllm_kvselect.selecting.ranking import RANKINGS, Candidates
from vllm_kvselect.selecting.selection import stage_1_counts, stage_2_keys


class Retention(NamedTuple):
    """What requests retain of what competes.

    Attributes:
        retained: Flat indices `(row * num_kv_heads + head) * num_competing + column`, ascending,
            `[n]` int64; a row is a layer of a request.
        offsets: Where each head's pages start among the packed ones, which count through the layers
            of a request, `[num_requests, num_layers * num_kv_heads + 1]` int64.
    """

    retained: torch.Tensor
    offsets: torch.Tensor


class Sizes(NamedTuple):
    """How much of what there is is retained: packed blocks of each request, and entries per page.

    A packed block holds a page per layer and head.
    """

    num_packed: Sequence[int]
    block_size: int


def retain(
    layers: Sequence[ScoringInputs],
    num_packed: int,
    block_size: int,
    config: EvictionConfig,
    kernels: Kernels = REFERENCES,
) -> Retention:
    """Scores, allocates and selects: the whole choice for one prompt.

    Args:
        layers: Of each layer: queries that the scorer looks through, keys of the whole prompt, and
            values of the tokens before the tail: only these compete, the tail is retained anyway.
        num_packed: Packed blocks, fewer than the values' tokens fill.
        block_size: Entries per page.
        config: Method and parameters.
        kernels: What computes the parts.

    Returns:
        The retained entries, and the heads' runs, `[num_layers * num_kv_heads + 1]`.
    """
    held = Held.of(layers)
    if not kernels.over_rows:  # nothing reads pages
        held = replace(held, make_paged=None)
    candidates = score(held, config, kernels)
    retention = choose(held, candidates, Sizes([num_packed], block_size), config, kernels)
    return retention._replace(offsets=retention.offsets[0])


def score(held: Held, config: EvictionConfig, kernels: Kernels = REFERENCES) -> Candidates:
    """The first half of the choice: scores what competes.

    Returns:
        The competing entries, `[num_rows, num_kv_heads, num_competing]` each. Norms are left out
        where they can be pruned once the budgets are known.
    """
    method = KNOWN_METHODS[config.method]

    def scores_by(name: str, parameters: EvictionConfig) -> torch.Tensor:
        return rows.scores(kernels, scorer_named(name), held, parameters)

    scores, weights, norms = scores_by(method.scores, config), None, None
    unpooled = config.of(Weights).stage_2_scores == "unpooled"
    if Weights in method.parameters and (method.weights or unpooled):
        stage_2 = config.model_copy(update={"kernel_size": 1}) if unpooled else config
        weights = scores_by(method.weights or method.scores, stage_2)
    if method.perturbation and (method.pooled or method.norms.ranking != "score"):
        by_product = method.norms.ranking == "product"
        norms_of = projected_value_l2_norms if by_product else projected_value_norms
        norms = rows.value_norms(kernels, held, norms_of).to(scores.dtype)
    return Candidates(scores, weights, norms, held.num_absent if held.has_absent else None)


def choose(
    held: Held | None,
    candidates: Candidates,
    sizes: Sizes,
    config: EvictionConfig,
    kernels: Kernels = REFERENCES,
) -> Retention:
    """The second half: ranks, allocates and selects.

    Without `held`, `candidates` has all that the method needs, and all columns are the requests'
    own.
    """
    method = KNOWN_METHODS[config.method]
    num_requests, block_size = len(sizes.num_packed), sizes.block_size
    num_rows, num_kv_heads, num_columns = candidates.scores.shape
    num_layers = num_rows // num_requests
    of_rows = [num for num in sizes.num_packed for _ in range(num_layers)]
    even = [num * block_size for num in of_rows]
    ranking = RANKINGS[method.norms.ranking](candidates, even, config)
    ranking = candidates.with_first(ranking, config.num_first)
    is_even = candidates.num_absent is None if held is None else held.is_even
    if not is_even:
        # A blended floor could give a head more pages than it has entries.
        config = config.model_copy(update={"floor": "minimum"})
    least = first_pages(config, block_size)
    blocks, segments = list(sizes.num_packed), num_requests
    if method.scope.is_pyramid:
        missing = [0] * num_requests if held is None else held.num_missing
        own = [(num_columns - none) // block_size for none in missing]
        blocks = [
            of_layer
            for num_packed, num_own in zip(sizes.num_packed, own, strict=True)
            for of_layer in pyramid_blocks(num_packed, num_layers, num_own, config, least)
        ]
        segments = num_rows
    elif not method.pooled:
        blocks, segments = of_rows, num_rows
    by_segment = ranking.reshape(segments, -1, num_columns)
    if config.num_first and method.allocator != "uniform_pages":
        # A head that wants little but its first tokens may want less than half a page more than it
        # has. Rounded, that would be none, and some of the first tokens would go.
        whole = [min(least, num_packed) * block_size for num_packed in blocks]
        by_segment = kernels.best_first(by_segment, whole)
    allocator: Allocator = getattr(kernels, method.allocator)
    pages = allocator(by_segment, blocks, block_size, config).flatten()
    budgets, of_page = pages * block_size, num_kv_heads * block_size
    if method.norms.two_stages and candidates.norms is None:
        assert held is not None
        retained = rows.select_pruned(
            kernels,
            held,
            ranking,
            candidates.stage_2,
            budgets,
            [num * of_page for num in of_rows],
            stage_1_counts(budgets, config.of(FirstStage).alpha, config.num_first),
            config.of(SecondStage).eps,
        )
    else:
        keys = _keys(method, candidates, ranking, budgets, config, kernels)
        retained = kernels.select(keys, budgets, sum(of_rows) * of_page)
    by_request = pages.view(num_requests, -1)
    offsets = by_request.new_zeros(num_requests, by_request.shape[1] + 1)
    torch.cumsum(by_request, 1, out=offsets[:, 1:])
    return Retention(retained, offsets)


def _keys(
    method: Method,
    candidates: Candidates,
    ranking: torch.Tensor,
    budgets: torch.Tensor,
    config: EvictionConfig,
    kernels: Kernels,
) -> torch.Tensor:
    """What entries are selected by, `[num_rows * num_kv_heads, num_competing]`."""
    keys = ranking.flatten(0, 1)
    if not method.norms.two_stages:
        return keys
    scores = candidates.with_first(candidates.scores, config.num_first).flatten(0, 1)
    of_stage_1 = stage_1_counts(budgets, config.of(FirstStage).alpha, config.num_first)
    stage_1 = kernels.best_mask(scores, of_stage_1)
    if method.norms.ranking != "score":
        return keys.masked_fill(stage_1, float("inf"))
    assert candidates.norms is not None
    weights, norms = (part.flatten(0, 1) for part in (candidates.stage_2, candidates.norms))
    keys = stage_2_keys(weights, norms, stage_1, config.of(SecondStage).eps)
    return candidates.without_absent(keys.view_as(candidates.scores)).flatten(0, 1)
