"""Queries of steps that may run as one graph: Python does not see these, but rounds need them."""

import torch

from vllm_kvselect.scoring.memory import StepQueries


class GraphQueries:
    """All queries of such a step, in one buffer; a graph holds the copies into it.

    What rounds will look through is taken out of it before the next step overwrites it.
    """

    def __init__(
        self,
        num_layers: int,
        num_rows: int,
        num_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_rows, num_heads, head_size)
        self._buffer = torch.zeros(shape, dtype=dtype, device=device)
        self._wanted: StepQueries | None = None

    def see(self, layer_index: int, query: torch.Tensor) -> None:
        """Copies the queries of a layer, `[num_tokens, num_heads, head_size]`; may be captured.

        A step that runs in pieces may be padded beyond the most rows: nobody wants what pads it.
        """
        rows = self._buffer[layer_index, : len(query)]
        rows.copy_(query[: len(rows)])

    def want(self, wanted: StepQueries | None) -> None:
        """Takes note of what is to be kept of the step at hand."""
        self._wanted = wanted

    def hand_over(self) -> None:
        """Hands over what was wanted of the last step; called before the next one is built."""
        if self._wanted is not None:
            self._wanted.take(self._buffer)
        self._wanted = None
