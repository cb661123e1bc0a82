"""RetentionState: what a worker remembers between steps."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from vllm_kvselect.engine.prompts import Prompt
from vllm_kvselect.engine.stopwatch import stopwatch


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

    `offsets` says where each head's pages start in the run of the request's packed pages, which
    counts through all layers (`page_table.py`). It is keyed by the id of a request's first packed
    block, which is private to the request: it needs no request ids, survives reordering of the
    batch and dies with the block. Block 0, vLLM's null block, keeps offsets of 0: no packed pages.

    Partial windows are keyed by the prompt, which the host knows without asking a device.

    `stopwatch` times what is done in the step that completes a prompt, `later_stopwatch` what is
    done before the next one. `completed` lists the prompts packed since the worker last took it,
    for its report; `version` counts all that were, so that what was built from the offsets is known
    to be out of date.

    Args:
        num_blocks: Blocks of the KV cache.
        num_layers: Layers of the group.
        num_kv_heads: KV heads on this rank.
        max_num_seqs: Requests that run at once; as many partial windows are kept at most.
        device: Where keys and values are.
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        max_num_seqs: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_layers = num_layers
        self.offsets = torch.zeros(
            num_blocks, num_layers, num_kv_heads + 1, dtype=torch.int32, device=device
        )
        self.stopwatch, self.later_stopwatch = (stopwatch(self.offsets.device) for _ in range(2))
        self.num_evicted = 0
        self.version = 0
        self.completed: list[Prompt] = []
        self._max_windows = max_num_seqs
        self._windows: OrderedDict[Hashable, WindowQueries] = OrderedDict()

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

    def open_window(self, owner: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Starts a partial window; what is left of an earlier attempt is replaced."""
        self._windows.pop(owner, None)
        # An aborted prefill leaves its window here, so the oldest goes when there are more than
        # requests can run. Should it still be wanted, the window is just shorter for scoring.
        while len(self._windows) >= self._max_windows:
            self._windows.popitem(last=False)
        queries = torch.empty(shape, dtype=dtype, device=self.offsets.device)
        self._windows[owner] = WindowQueries(queries, 0)

    def window(self, owner: Hashable, num_filled: int) -> WindowQueries | None:
        """The partial window of a prompt if it holds just the tokens computed so far."""
        window = self._windows.get(owner)
        return window if window is not None and window.num_filled == num_filled else None

    def close_window(self, owner: Hashable) -> None:
        """Forgets a partial window."""
        self._windows.pop(owner, None)

    def clear(self) -> None:
        """Forgets everything: the state is as new."""
        self.offsets.zero_()
        self.reset_counts()
        self.completed.clear()
        self._windows.clear()

    def reset_counts(self) -> None:
        """Sets to zero what is only counted."""
        self.stopwatch.reset()
        self.later_stopwatch.reset()
        self.num_evicted = 0

    @property
    def selection_seconds(self) -> float:
        """Time spent choosing and packing."""
        return self.stopwatch.seconds + self.later_stopwatch.seconds

    def complete(self, prompt: Prompt) -> None:
        """Takes note that a prompt is about to be packed."""
        self.completed.append(prompt)
        self.num_evicted += 1
        self.version += 1
