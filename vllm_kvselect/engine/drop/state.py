"""RetentionState: what a worker remembers of its KV cache between steps."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvselect.engine.drop.arriving import Arriving
from vllm_kvselect.engine.drop.following import followed_layers
from vllm_kvselect.engine.drop.request import Request
from vllm_kvselect.engine.drop.stopwatch import stopwatch
from vllm_kvselect.engine.view.page_tables import PageOffsets
from vllm_kvselect.paging.compaction import head_pages
from vllm_kvselect.planning.cuts import Cut


class Made(NamedTuple):
    """A cut that was made; what it frees and drops, in blocks and in pages of each head, is new."""

    request: Request
    cut: Cut
    num_freed: int
    num_dropped: int


class RetentionState(PageOffsets):
    """Page offsets, and what a worker remembers beside them of the requests in its KV cache.

    `numbers` are what entries were scored by when they were packed, page by page as keys are, `[
    num_pages, page_size]` float32, of the layers that choose; None where no cut reads them again.
    They move with the entries, and so serve whoever goes on from them.

    `stopwatch` times cuts, `estimate_stopwatch` the choice of blocks that sparse segments read.
    `completed` lists the cuts that were made for the first time since the worker last took it, for
    its report. The last `num_following` layers choose nothing themselves: a drafter's. Numbers are
    kept of pages of `page_size` entries; of none where that is 0.

    Attributes:
        num_choosing: Layers before these.
        followed: The layer whose choice each of these follows.
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        device: torch.device | str = "cpu",
        num_following: int = 0,
        per_block: int = 1,
        page_size: int = 0,
    ) -> None:
        super().__init__(num_blocks, num_layers, num_kv_heads, device, per_block)
        self.num_choosing = num_layers - num_following
        self.followed = followed_layers(self.num_choosing, num_following)
        self.numbers: torch.Tensor | None = None
        if page_size:
            num_pages = self.num_choosing * num_blocks * num_kv_heads
            self.numbers = torch.zeros(num_pages, page_size, device=device)
        self.stopwatch, self.estimate_stopwatch = (stopwatch(self.offsets.device) for _ in range(2))
        self.num_evicted = 0
        self.completed: list[Made] = []

    def keep_numbers(self, packed_blocks: torch.Tensor, numbers: torch.Tensor) -> None:
        """Remembers the numbers of packed entries.

        Args:
            packed_blocks: Their blocks in the memory of all layers, `[n]` int64.
            numbers: Those of the entries in their order, `[n * num_kv_heads * page_size]`.
        """
        assert self.numbers is not None
        pages = head_pages(packed_blocks, self.num_kv_heads).T.flatten()
        self.numbers[pages] = numbers.view(len(pages), -1).to(self.numbers.dtype)

    def go_on(self, found: Sequence[tuple[Request, int]]) -> None:
        """Takes note of how many pages are packed of what requests go on from, by first block."""
        found = [(request, key) for request, key in found if request.next_cut is not None]
        if found:
            keys = async_tensor_h2d(
                np.array([key for _, key in found], np.int64), self.offsets.device
            )
            for (request, _), run in zip(found, self._longest_runs(keys), strict=True):
                request.progress.longest_run = run

    def clear(self) -> None:
        """Forgets everything: the state is as new."""
        self.offsets.zero_()
        self.version += 1
        self.reset_counts()
        self.completed.clear()

    def reset_counts(self) -> None:
        """Sets to zero what is only counted."""
        self.stopwatch.reset()
        self.estimate_stopwatch.reset()
        self.num_evicted = 0

    def complete(self, made: Sequence[tuple[Request, Cut]], keys: torch.Tensor) -> None:
        """Takes note that the next cuts of requests are made, and their offsets are stored."""
        longest_runs: Sequence[Arriving | None] = [None] * len(made)
        if any(cut is not request.plan.cuts[-1] for request, cut in made):
            longest_runs = self._longest_runs(keys)
        for (request, cut), longest_run in zip(made, longest_runs, strict=True):
            self.num_evicted += request.completes_prompt(cut)
            if request.progress.num_made >= request.num_reported:
                freed, dropped = cut.num_freed, cut.num_dropped
                if (before := request.last_cut) is not None:
                    freed, dropped = freed - before.num_freed, dropped - before.num_dropped
                self.completed.append(Made(request, cut, freed, dropped))
                request.num_reported = request.progress.num_made + 1
            request.complete_cut(cut, None if cut is request.plan.cuts[-1] else longest_run)

    def _longest_runs(self, keys: torch.Tensor) -> list[Arriving]:
        """The most packed pages that a head has, for each first packed block."""
        return Arriving.each(self.offsets[keys].diff(dim=-1).amax((1, 2)))
