"""What is computed of all rows that requests hold: by a twin of all rows, or by one of a layer.

Here alone functions of one layer are lifted to rows: row by row or, where each head counts by
itself, with the heads of several layers as those of one. What lies before a request's own columns
is 0.
"""

from collections.abc import Callable, Sequence

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.paging.compaction import MOST_BYTES
from vllm_kvselect.scoring.at_random import random_scores
from vllm_kvselect.scoring.held import Held
from vllm_kvselect.scoring.inputs import Scorer, ScoringInputs
from vllm_kvselect.scoring.knorm import knorm_scores
from vllm_kvselect.scoring.r_kv import r_kv_scores
from vllm_kvselect.scoring.streaming_llm import streaming_llm_scores
from vllm_kvselect.scoring.value_norms import OutputProjection, projected_value_norms

ValueNorms = Callable[[torch.Tensor, OutputProjection], torch.Tensor]

HEAD_BY_HEAD = (knorm_scores, random_scores, streaming_llm_scores, r_kv_scores)
"""Scorers to which a head is the same in any layer, and which have no twin of all rows."""


def scores(kernels: Kernels, scorer: Scorer, held: Held, config: EvictionConfig) -> torch.Tensor:
    """Scores what competes.

    Returns:
        `[num_rows, num_kv_heads, num_competing]`, at least float32.
    """
    if twin := kernels.over_rows.get(scorer.__name__):
        return twin(held, config)
    of_layer = kernels.scorer(scorer)

    def competing(inputs: ScoringInputs) -> torch.Tensor:
        return of_layer(inputs, config)[:, : inputs.value.shape[1]]

    return _lifted(held, competing, MOST_BYTES if scorer in HEAD_BY_HEAD else 0)


def value_norms(
    kernels: Kernels, held: Held, reference: ValueNorms = projected_value_norms
) -> torch.Tensor:
    """Projected value norms of what competes, shaped as scores."""
    if twin := kernels.over_rows.get(reference.__name__):
        return twin(held)
    norms_of = kernels.twin(reference)

    def of_layer(inputs: ScoringInputs) -> torch.Tensor:
        assert inputs.output_projection is not None
        return norms_of(inputs.value, inputs.output_projection)

    return _lifted(held, of_layer)


def select_pruned(
    kernels: Kernels,
    held: Held,
    scores: torch.Tensor,
    weights: torch.Tensor,
    budgets: torch.Tensor,
    num_retained: Sequence[int],
    of_stage_1: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Selects in two stages, with the norms that this takes; see `pruning.select_pruned`.

    Args:
        kernels: What computes.
        held: What the requests hold.
        scores: `[num_rows, num_kv_heads, num_competing]`.
        weights: Likewise.
        budgets: Entries per head, `[num_rows * num_kv_heads]` int64.
        num_retained: Their sum in each row.
        of_stage_1: Entries per head that stage 1 retains, shaped as the budgets.
        eps: Added to the weight in stage 2.

    Returns:
        `(row * num_kv_heads + head) * num_competing + column`, ascending, `[n]` int64.
    """
    if twin := kernels.over_rows.get("select_pruned"):
        return twin(held, scores, weights, budgets, num_retained, of_stage_1, eps)
    found = []
    by_row, by_row_1 = (part.view(held.num_rows, -1) for part in (budgets, of_stage_1))
    for rows, inputs in held.rows():
        index = rows.start
        own = held.own(index)
        assert inputs.output_projection is not None
        retained = kernels.select_pruned(
            scores[index, :, own],
            weights[index, :, own],
            inputs.value,
            inputs.output_projection,
            by_row[index],
            num_retained[index],
            by_row_1[index],
            eps,
            inputs.num_absent,
        )
        num_own = held.num_competing - own.start
        owner, column = retained // num_own, retained % num_own
        owner += index * held.num_kv_heads
        found.append(owner * held.num_competing + column + own.start)
    return torch.cat(found)


def _lifted(
    held: Held, of_layer: Callable[[ScoringInputs], torch.Tensor], most_bytes: int = 0
) -> torch.Tensor:
    """What a function of one layer gives of every row."""
    found: torch.Tensor | None = None
    for rows, inputs in held.rows(most_bytes):
        part = of_layer(inputs)
        if found is None:
            found = part.new_zeros(held.num_rows, held.num_kv_heads, held.num_competing)
        found[rows, :, held.own(rows.start)] = part.view(-1, held.num_kv_heads, part.shape[1])
    assert found is not None
    return found
