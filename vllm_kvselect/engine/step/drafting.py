"""Splits the batches of a drafter, whose layers lie in the group of its target's.

A drafter is computed once the step's tokens are sampled, several times over. Its first batch has
the step's tokens, each further one a drafted token of every request. It asks for metadata itself.
"""

import torch

from vllm_kvselect.engine.drop.request import Request
from vllm_kvselect.engine.step.rows import Rows
from vllm_kvselect.engine.step.sparse import SparseRow
from vllm_kvselect.engine.step.split import Completion, Observation, Splitter
from vllm_kvselect.planning.cuts import Cut
from vllm_kvselect.scoring.memory import StepQueries


class DraftSplitter(Splitter):
    """Lets a drafter read what is packed, and everything of requests that have nothing packed yet.

    It chooses nothing, so nothing of it is seen or scored. What a step's cut retains is packed in
    its layers after the step (`Drop`): until then all entries are where they were.
    """

    def _border(self, request: Request) -> Cut | None:
        return request.last_cut

    def _seen_queries(self, rows: Rows, device: torch.device) -> StepQueries | None:
        return None

    def _observations(self, rows: Rows, block_table: torch.Tensor) -> list[Observation]:
        return []

    def _completions(self, rows: Rows, block_table: torch.Tensor) -> list[Completion]:
        return []

    def _sparse_rows(self, rows: Rows, block_table: torch.Tensor) -> dict[int, SparseRow]:
        return {}
