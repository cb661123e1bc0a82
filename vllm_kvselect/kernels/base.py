"""Kernels: the functions that a choice is computed with, one field a part.

Each default is the reference in PyTorch. A device replaces fields with twins of the same name and
signature; a field that does not exist is an error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

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


class PageTableBuilder(Protocol):
    """The signature of `page_table.headwise_page_table`."""

    def __call__(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        first_packed: torch.Tensor,
        tail_start: torch.Tensor,
        offsets: torch.Tensor,
        block_size: int,
        num_blocks: int,
        first_layer: int = 0,
        out: PageTable | None = None,
        order: torch.Tensor | None = None,
        per_block: int = 1,
    ) -> PageTable:
        """Builds page tables; see the reference."""


@dataclass(frozen=True)
class Kernels:
    """The parts that a device may compute in its own way; see each reference.

    Attributes:
        snapkv_scores: Scores of the observation window.
        mean_attention: The same without pooling.
        defensive_scores: The worst case of the window's attention.
        r_kv_scores: Scores of the window, less how much a key repeats others.
        probe_scores: What a probe says of tokens.
        projected_value_norms: Norms of all entries.
        uniform_pages: The same number of pages for every head.
        adaptive_pages: Pages by the heads' best entries, with a safeguard.
        shared_pages: The same without one.
        best_first: Scores of which each head's best come before all others.
        best_mask: Marks each head's best entries.
        select: Entries that are retained by one key.
        select_pruned: Entries that are retained in two stages, with the norms that this takes.
        read_pages: Whole pages of a cache whose pages have an inner order.
        read_entries: Single entries of such a cache.
        write_entries: The same, written.
        look_up: The numbers that bytes of a quantised cache stand for.
        move_retained: What is retained, from where it is into packed blocks.
        headwise_page_table: Page tables of single heads.
        longest_first: In which order attention takes single heads.
        extremes: Largest and smallest values of groups of tokens.
        criticality: What share of a segment's attention goes to each block before it.
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
    select_pruned: Callable[
        [
            torch.Tensor,
            torch.Tensor,
            torch.Tensor,
            OutputProjection,
            torch.Tensor,
            int,
            torch.Tensor,
            float,
            torch.Tensor | None,
        ],
        torch.Tensor,
    ] = pruning.select_pruned
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
    headwise_page_table: PageTableBuilder = page_table.headwise_page_table
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
