"""Splits the batches of a drafter, whose layers lie in the group of its target's.

A drafter is computed once the step's tokens are sampled, several times over. Its first batch has
the step's tokens, each further one a drafted token of every request. It asks for metadata itself.
"""

import torch

from vllm_kvselect.engine.step.rows import Rows
from vllm_kvselect.engine.step.sparse import SparseRow
from vllm_kvselect.engine.step.split import Seen, Splitter


class DraftSplitter(Splitter):
    """Lets a drafter read what is packed, and everything of requests that have nothing packed yet.

    It chooses nothing, so nothing of it is seen.
    """

    def _seen(self, rows: Rows) -> Seen | None:
        return None

    def _sparse_rows(self, rows: Rows, block_table: torch.Tensor) -> dict[int, SparseRow]:
        return {}
