"""RetentionState: what a worker remembers of its KV cache between steps."""

import torch

from vllm_kvselect.engine.step.arriving import Arriving
from vllm_kvselect.engine.step.request import Request
from vllm_kvselect.engine.step.stopwatch import stopwatch
from vllm_kvselect.retention import Cut


class RetentionState:
    """Page offsets of the requests in a worker's KV cache.

    `offsets` says where each head's pages start in the run of the request's packed pages, which
    counts through all layers (`page_table.py`). It is keyed by the id of a request's first packed
    block, which no other packed run has: it needs no request ids, survives reordering of the batch,
    serves all requests that share a context, and dies with the block. Block 0, vLLM's null block,
    keeps offsets of 0: no packed pages.

    `stopwatch` times what is done in the step that completes a prompt, `later_stopwatch` what is
    done before the next one; rounds count as the former. `estimate_stopwatch` times the choice of
    blocks that sparse segments read. `completed` lists the requests packed
    since the worker last took it, for its report, and `rounds` the blocks freed in each round.
    `version` counts both, so that what was built from the offsets is known to be out of date.

    Args:
        num_blocks: Blocks of the KV cache.
        num_layers: Layers of the group.
        num_kv_heads: KV heads on this rank.
        device: Where keys and values are.
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_layers, self.num_kv_heads = num_layers, num_kv_heads
        self.offsets = torch.zeros(
            num_blocks, num_layers, num_kv_heads + 1, dtype=torch.int32, device=device
        )
        self.stopwatch, self.later_stopwatch, self.estimate_stopwatch = (
            stopwatch(self.offsets.device) for _ in range(3)
        )
        self.num_evicted = 0
        self.version = 0
        self.completed: list[Request] = []
        self.rounds: list[int] = []

    def store(
        self,
        first_packed_block: int | torch.Tensor,
        offsets: torch.Tensor,
        layer: int | None = None,
    ) -> None:
        """Remembers where the pages of a prompt's heads start.

        Args:
            first_packed_block: Id of the first packed block, or `[1]` int64 where block tables are.
            offsets: `[num_kv_heads + 1]` of a layer, or `[num_layers, num_kv_heads + 1]`.
            layer: The layer; None for all.
        """
        layers = slice(None) if layer is None else layer
        self.offsets[first_packed_block, layers] = offsets.to(self.offsets.dtype)

    def clear(self) -> None:
        """Forgets everything: the state is as new."""
        self.offsets.zero_()
        self.reset_counts()
        self.completed.clear()
        self.rounds.clear()

    def reset_counts(self) -> None:
        """Sets to zero what is only counted."""
        self.stopwatch.reset()
        self.later_stopwatch.reset()
        self.estimate_stopwatch.reset()
        self.num_evicted = 0

    @property
    def selection_seconds(self) -> float:
        """Time spent choosing and packing."""
        return self.stopwatch.seconds + self.later_stopwatch.seconds

    def complete_round(
        self, request: Request, cut: Cut, first_packed_block: int | torch.Tensor
    ) -> None:
        """Takes note of a round that is made, and whose offsets are stored."""
        num_freed = cut.first_packed - (request.cut.first_packed if request.cut else 0)
        if cut.position > request.last_counted_round:
            self.rounds.append(num_freed)
        request.make_round(cut)
        self._complete(request, first_packed_block)

    def complete(self, request: Request, first_packed_block: int | torch.Tensor) -> None:
        """Takes note that a request is packed, and its offsets are stored."""
        self.completed.append(request)
        self.num_evicted += 1
        self._complete(request, first_packed_block)

    def _complete(self, request: Request, first_packed_block: int | torch.Tensor) -> None:
        self.version += 1
        if request.next_round is not None:
            run_pages = self.offsets[first_packed_block].diff(dim=-1)
            request.longest_run = Arriving(run_pages.amax())
