"""What is computed of all rows that requests hold: by a twin of all rows, or row by row.

Here alone functions of one layer are lifted to rows. What lies before a request's own columns is 0.
"""

from collections.abc import Callable, Sequence

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.scoring.held import Held
from vllm_kvselect.scoring.inputs import Scorer, ScoringInputs
from vllm_kvselect.scoring.value_norms import projected_value_l2_norms


def scores(kernels: Kernels, scorer: Scorer, held: Held, config: EvictionConfig) -> torch.Tensor:
    """Scores what competes.

    Args:
        kernels: What computes.
        scorer: The reference of one layer.
        held: What the requests hold.
        config: Their configuration.

    Returns:
        `[num_rows, num_kv_heads, num_competing]`, at least float32.
    """
    if twin := kernels.over_rows.get(scorer.__name__):
        return twin(held, config)
    of_layer = kernels.scorer(scorer)
    return _lifted(held, lambda inputs: of_layer(inputs, config)[:, : inputs.value.shape[1]])


def value_norms(kernels: Kernels, held: Held) -> torch.Tensor:
    """Projected value norms of what competes, shaped as scores."""
    if twin := kernels.over_rows.get("projected_value_norms"):
        return twin(held)

    def of_layer(inputs: ScoringInputs) -> torch.Tensor:
        assert inputs.output_projection is not None
        return kernels.projected_value_norms(inputs.value, inputs.output_projection)

    return _lifted(held, of_layer)


def value_l2_norms(kernels: Kernels, held: Held) -> torch.Tensor:
    """The same as L2 norms, without a projection."""
    if twin := kernels.over_rows.get("projected_value_l2_norms"):
        return twin(held)

    def of_layer(inputs: ScoringInputs) -> torch.Tensor:
        assert inputs.output_projection is not None
        return projected_value_l2_norms(inputs.value, inputs.output_projection)

    return _lifted(held, of_layer)


def select_pruned(
    kernels: Kernels,
    held: Held,
    scores: torch.Tensor,
    weights: torch.Tensor,
    budgets: torch.Tensor,
    num_retained: Sequence[int],
    alpha: float,
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
        alpha: Share of a budget that stage 1 fills.
        eps: Added to the weight in stage 2.

    Returns:
        `(row * num_kv_heads + head) * num_competing + column`, ascending, `[n]` int64.
    """
    if twin := kernels.over_rows.get("select_pruned"):
        return twin(held, scores, weights, budgets, num_retained, alpha, eps)
    found = []
    by_row = budgets.view(held.num_rows, -1)
    for index, inputs in enumerate(held.rows()):
        own = held.own(index)
        assert inputs.output_projection is not None
        retained = kernels.select_pruned(
            scores[index, :, own],
            weights[index, :, own],
            inputs.value,
            inputs.output_projection,
            by_row[index],
            num_retained[index],
            alpha,
            eps,
            inputs.num_absent,
        )
        num_own = held.num_competing - own.start
        owner, column = retained // num_own, retained % num_own
        owner += index * held.num_kv_heads
        found.append(owner * held.num_competing + column + own.start)
    return torch.cat(found)


def _lifted(held: Held, of_layer: Callable[[ScoringInputs], torch.Tensor]) -> torch.Tensor:
    """What a function of one layer gives of every row."""
    found: torch.Tensor | None = None
    for index, inputs in enumerate(held.rows()):
        part = of_layer(inputs)
        if found is None:
            found = part.new_zeros(held.num_rows, held.num_kv_heads, held.num_competing)
        found[index, :, held.own(index)] = part
    assert found is not None
    return found
