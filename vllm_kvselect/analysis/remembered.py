"""Kernels for an analysis: what many settings on one prompt have in common is computed once.

Most of a choice on a CPU is the projected value norms, and they depend on neither method nor
budget. So all of them are computed, which the engine, with one setting a prompt, avoids.
"""

import torch

from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.scoring.value_norms import OutputProjection, value_norms
from vllm_kvselect.selecting.selection import select, stage_1_mask, stage_2_keys


def remembering() -> Kernels:
    """Makes kernels that remember norms; for one prompt, since a layer's values must not change.

    Returns:
        The references, but for norms and for the selection that needs them.
    """
    known: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def remembered_norms(value: torch.Tensor, projection: OutputProjection) -> torch.Tensor:
        layer = (projection.weight.data_ptr(), value.shape)
        if layer not in known:
            known[layer] = value_norms(value, projection.weight)
        return known[layer]

    def select_by_all_norms(
        scores: torch.Tensor,
        weights: torch.Tensor,
        value: torch.Tensor,
        projection: OutputProjection,
        budgets: torch.Tensor,
        num_retained: int,
        alpha: float,
        eps: float,
    ) -> torch.Tensor:
        norms = remembered_norms(value, projection).to(scores.dtype)
        stage_1 = stage_1_mask(scores, budgets, alpha)
        return select(stage_2_keys(weights, norms, stage_1, eps), budgets, num_retained)

    return Kernels(projected_value_norms=remembered_norms, select_pruned=select_by_all_norms)
