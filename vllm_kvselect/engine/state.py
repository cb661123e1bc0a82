"""RetentionState: what a worker remembers between steps, keyed by the first packed block."""

from collections import OrderedDict
from dataclasses import dataclass

import torch

from vllm_kvselect.engine.prompts import Prompt


@dataclass
class WindowQueries:
    """Queries of an observation window that two or more chunks of a prefill compute together.

    Attributes:
        queries: `[num_layers, window, num_heads, head_size]`.
        num_filled: How many of the window's tokens are in, from its first on.
    """

    queries: torch.Tensor
    num_filled: int


class RetentionState:
    """Page offsets and partial windows of the requests in a worker's KV cache.

    Everything is keyed by the id of a request's first packed block, which is private to the
    request: the state needs no request ids, survives reordering of the batch and dies with the
    block.

    `offsets` says where each head's pages start in the run of the request's packed pages, which
    counts through all layers (`page_table.py`).

    `completed` lists the prompts packed since the worker last took it, for its report; `version`
    counts all that were, so that what was built from the offsets is known to be out of date.

    Args:
        num_blocks: Blocks of the KV cache.
        num_layers: Layers of the group.
        num_kv_heads: KV heads on this rank.
        max_num_seqs: Requests that run at once; as many partial windows are kept at most.
    """

    def __init__(
        self, num_blocks: int, num_layers: int, num_kv_heads: int, max_num_seqs: int
    ) -> None:
        self.num_layers = num_layers
        self.offsets = torch.zeros(num_blocks, num_layers, num_kv_heads + 1, dtype=torch.int32)
        self.selection_seconds = 0.0
        self.num_evicted = 0
        self.version = 0
        self.completed: list[Prompt] = []
        self._max_windows = max_num_seqs
        self._windows: OrderedDict[int, WindowQueries] = OrderedDict()

    def open_window(
        self, first_packed_block: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """Starts a partial window; one that an aborted request left behind is replaced."""
        self._windows.pop(first_packed_block, None)
        # An aborted prefill leaves its window here, so the oldest goes when there are more than
        # requests can run. Should it still be wanted, the window is just shorter for scoring.
        while len(self._windows) >= self._max_windows:
            self._windows.popitem(last=False)
        self._windows[first_packed_block] = WindowQueries(torch.empty(shape, dtype=dtype), 0)

    def window(self, first_packed_block: int, num_filled: int) -> WindowQueries | None:
        """The partial window of a request if it holds just the tokens computed so far."""
        window = self._windows.get(first_packed_block)
        return window if window is not None and window.num_filled == num_filled else None

    def close_window(self, first_packed_block: int) -> None:
        """Forgets a partial window."""
        self._windows.pop(first_packed_block, None)

    def complete(self, prompt: Prompt, first_packed_block: int) -> None:
        """Takes note that a prompt is about to be packed."""
        self.close_window(first_packed_block)
        self.completed.append(prompt)
        self.num_evicted += 1
        self.version += 1
