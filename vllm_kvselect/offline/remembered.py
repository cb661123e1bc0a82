"""Kernels for many settings on one prompt: what they have in common is computed once.

Most of a choice on a CPU is scores and projected value norms. Neither depends on the budget, few
methods have scores of their own, and all share the norms. So norms are computed of all entries,
which the engine, with one setting a prompt, avoids.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.scoring.inputs import Scorer, ScoringInputs
from vllm_kvselect.scoring.value_norms import OutputProjection, value_norms
from vllm_kvselect.selecting.selection import best_mask, select, stage_2_keys


@dataclass(frozen=True)
class _Remembering(Kernels):
    """The references, but for what is remembered."""

    known_scores: dict[Any, torch.Tensor] = field(default_factory=dict)

    def scorer(self, reference: Scorer) -> Scorer:
        """The scorer, which computes nothing twice for a layer."""

        def remembered(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
            # What is left of a configuration once method and budget are the same.
            parameters = config.model_copy(update={"method": "none", "budget": 1})
            shapes = (inputs.query.shape, inputs.key.shape, inputs.value.shape)
            which = (reference, inputs.layer_index, shapes, parameters)
            if which not in self.known_scores:
                self.known_scores[which] = reference(inputs, config)
            return self.known_scores[which]

        return remembered


def remembering() -> Kernels:
    """Makes kernels for one prompt, since a layer's tensors must not change.

    Returns:
        The references, but for scores, norms, and the selection that needs norms.
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
        of_stage_1: torch.Tensor,
        eps: float,
        num_absent: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert num_absent is None, "prompts have an entry in every column"
        norms = remembered_norms(value, projection).to(scores.dtype)
        stage_1 = best_mask(scores, of_stage_1)
        return select(stage_2_keys(weights, norms, stage_1, eps), budgets, num_retained)

    return _Remembering(projected_value_norms=remembered_norms, select_pruned=select_by_all_norms)
