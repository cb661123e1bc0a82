"""What is due of a request that generates, before the step at hand is computed."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_kvselect.engine.drop.columns import Columns
from vllm_kvselect.engine.drop.drop import Drop, DropLayer
from vllm_kvselect.engine.drop.request import Request
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.scoring.memory import EntrySums


class DueDrops:
    """Makes the cuts that lie in answers, in all layers of a group.

    Args:
        layers: The layers that choose, in order.
        state: State of the group's layers.
        block_size: Tokens per block.
    """

    drop_class = Drop

    def __init__(self, layers: Sequence[DropLayer], state: RetentionState, block_size: int) -> None:
        self._layers, self._state, self._block_size = layers, state, block_size

    def make(self, request: Request) -> None:
        """Makes the cut of a request that is due, or adds up what a later one needs."""
        if (cut := request.due_cut) is not None:
            with self._state.stopwatch:
                packed = request.progress.block_ids[cut.first_packed : cut.tail_start]
                packed = async_tensor_h2d(np.array(packed), self._state.offsets.device)
                columns = self._columns(request, cut.position)
                drop = self.drop_class(request, columns, packed, self._state, self._block_size)
                drop.make(self._layers)
        elif request.is_behind:
            with self._state.stopwatch:
                self._catch_up(request)

    def _columns(self, request: Request, position: int) -> Columns:
        """What the request holds."""
        longest_run = request.progress.longest_run
        block_ids = request.progress.block_ids[: -(-position // self._block_size)]
        if request.last_cut is None and request.plan.num_in_prompt == 1:
            blocks = async_tensor_h2d(np.array(block_ids), self._state.offsets.device)
            return Columns.of_prompt(blocks, position, self._state)
        return Columns.after(
            request.last_cut,
            position,
            block_ids,
            0 if longest_run is None else int(longest_run),
            self._block_size,
            self._state,
        )

    def _catch_up(self, request: Request) -> None:
        """Adds up what entries have received since the last time, so that no queries pile up."""
        progress, position, next_cut = request.progress, request.num_computed, request.next_cut
        assert next_cut is not None
        columns = self._columns(request, position)
        memory, num_absent = progress.memory, columns.num_absent
        assert isinstance(memory, EntrySums)
        assert num_absent is not None
        num_absent = num_absent[: len(self._layers)]
        queries = progress.queries.of_all_layers(request.first_query(next_cut), position)
        memory.lay_out(columns.num_entries, columns.num_packed, num_absent)
        for layer in self._layers:
            index = layer.layer_index
            key, value = layer.read(columns.pages[index], 0)
            inputs = layer.inputs(queries[index], key[:, : columns.num_entries], value)
            memory.complete(replace(inputs, num_absent=num_absent[index]))
        # The tail begins where it began: what is packed stays packed.
        memory.rest(position, columns.num_packed, num_absent)
        progress.queries.forget_before(position)
