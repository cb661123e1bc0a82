"""Kernels: the functions that a choice is computed with, one field a part.

Each default is the reference in PyTorch. A device replaces fields with twins of the same name and
signature; a field that does not exist is an error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.paging import compaction, order, page_table
from vllm_kvselect.paging.order import Orders
from vllm_kvselect.paging.page_table import PageTable
from vllm_kvselect.prefilling import criticality
from vllm_kvselect.prefilling.criticality import Extremes
from vllm_kvselect.scoring import defensivekv, probe, r_kv, snapkv, value_norms
from vllm_kvselect.scoring.inputs import Scorer
from vllm_kvselect.scoring.value_norms import OutputProjection
from vllm_kvselect.selecting import allocation, pruning, selection

Function = TypeVar("Function", bound=Callable[..., Any])

Allocator = Callable[[torch.Tensor, Sequence[int], int, EvictionConfig], torch.Tensor]
"""`(ranking, num_packed, block_size, config)` -> pages per head, by segments of heads."""


@dataclass(frozen=True)
class Kernels:
    """The parts that a device may compute in its own way, each under the name of its reference.

    Attributes:
        over_rows: Twins that compute all rows at once, by the names of their references; what is
            not among them is computed row by row (`rows.py`).
    """

    snapkv_scores: Scorer = snapkv.snapkv_scores
    mean_attention: Scorer = defensivekv.mean_attention
    defensive_scores: Scorer = defensivekv.defensive_scores
    r_kv_scores: Scorer = r_kv.r_kv_scores
    probe_scores: Scorer = probe.probe_scores
    projected_value_norms: Callable[[torch.Tensor, OutputProjection], torch.Tensor] = (
        value_norms.projected_value_norms
    )
    uniform_pages: Allocator = allocation.uniform_pages
    adaptive_pages: Allocator = allocation.adaptive_pages
    shared_pages: Allocator = allocation.shared_pages
    best_first: Callable[[torch.Tensor, Sequence[int]], torch.Tensor] = selection.best_first
    best_mask: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = selection.best_mask
    select: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] = selection.select
    select_pruned: Callable[..., torch.Tensor] = pruning.select_pruned
    read_pages: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = (
        compaction.read_pages
    )
    read_entries: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor] = (
        compaction.read_entries
    )
    write_entries: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor], None] = (
        compaction.write_entries
    )
    look_up: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = compaction.look_up
    move_retained: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor], None] = (
        compaction.move_retained
    )
    headwise_page_table: Callable[..., PageTable] = page_table.headwise_page_table
    longest_first: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, Orders], None] = (
        order.longest_first
    )
    extremes: Callable[[torch.Tensor, int], Extremes] = criticality.extremes
    criticality: Callable[[Extremes, Extremes, float, torch.Tensor], torch.Tensor] = (
        criticality.criticality
    )

    over_rows: Mapping[str, Callable[..., torch.Tensor]] = field(default_factory=dict)

    def twin(self, reference: Function) -> Function:
        """The field with a function's name, or the function itself where there is none."""
        found: Function = getattr(self, reference.__name__, reference)
        return found

    def scorer(self, reference: Scorer) -> Scorer:
        """The twin of a scorer."""
        return self.twin(reference)


REFERENCES = Kernels()
"""PyTorch on any device."""
