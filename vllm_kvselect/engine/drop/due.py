"""The cuts that are due before the step at hand is computed."""

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch

from vllm_kvselect.engine.drop.columns import Columns
from vllm_kvselect.engine.drop.drop import Drop, DropLayer
from vllm_kvselect.engine.drop.request import Request
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.scoring.held import Paged

MOST_NUMBERS = 2**24
"""Numbers that one pass holds for each thing that is said of an entry: 64 MiB in float32.

A single request may have more."""

LEAST_COLUMNS = 4096
"""What a request counts for at least: the queries of its window take as much as so many columns."""


class DueDrops:
    """Makes cuts, in all layers of a group that choose."""

    drop_class = Drop

    def __init__(self, layers: Sequence[DropLayer], state: RetentionState, page_size: int) -> None:
        self._layers, self._state, self._page_size = layers, state, page_size

    def make(self, due: Sequence[Request]) -> None:
        """Makes the next cuts of some requests, those with equal settings in one pass if they may.

        They come in the order in which they got their fresh blocks.
        """
        if not due:
            return
        with self._state.stopwatch:
            for part in self._passes(due):
                make_paged = (lambda: self._paged) if self._reads_pages else None
                state, size = self._state, self._page_size
                self.drop_class(part, self._layers, state, size, make_paged).make()

    def _passes(self, due: Sequence[Request]) -> Iterator[list[Request]]:
        """Requests whose cuts are made at once."""
        alike: list[list[Request]] = []
        for request in due:
            packed = set(request.progress.swap.fresh)
            for group in reversed(alike):
                if _are_alike(group[0], request):
                    group.append(request)
                    break
                # Its fresh blocks may be what others have given back, and are still to read.
                if any(packed.intersection(each.progress.swap.given_back) for each in group):
                    alike.append([request])
                    break
            else:
                alike.append([request])
        per_column = self._state.num_choosing * self._state.num_kv_heads
        for group in alike:
            part: list[Request] = []
            longest = 0
            for request in group:
                own = max(LEAST_COLUMNS, Columns.num_own(request, self._page_size))
                together = (len(part) + 1) * max(longest, own) * per_column
                if part and together > MOST_NUMBERS:
                    yield part
                    part, longest = [], 0
                part.append(request)
                longest = max(longest, own)
            yield part

    @cached_property
    def _reads_pages(self) -> bool:
        """Whether kernels read through pages; asked once, as a layer may make tables to answer."""
        return self._layers[0].memory is not None

    @cached_property
    def _paged(self) -> Paged:
        """The memory of all layers, and the constants of those that choose."""
        memories = [layer.memory for layer in self._layers if layer.memory is not None]
        codes = [of_layer for _, of_layer in memories if of_layer is not None]
        memory = memories[0][0]
        nothing = [memory.new_empty(0, dtype=torch.float32)] * 3
        constants = [layer.inputs(*nothing) for layer in self._layers]
        return Paged.of(constants, memory, torch.stack(codes) if codes else None)


def _are_alike(one: Request, other: Request) -> bool:
    """Whether two requests may be cut in one pass."""
    is_even = Columns.are_even(one) == Columns.are_even(other)
    return is_even and one.plan.settings == other.plan.settings
