"""A folder of contexts for `TaggedWorker`: files in memory, which come as late as they like."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.engine.report import StepReport
from vllm_kvselect.engine.states.identity import StoreIdentity
from vllm_kvselect.engine.states.worker_contexts import StoredContexts
from vllm_kvselect.engine.states.worker_files import Shape, Transfers
from vllm_kvselect.store.file import FileError, Place, Stored
from vllm_kvselect.store.folder import Folder

IDENTITY = StoreIdentity("server", 1)
Packed = tuple[tuple[object, ...], list[list[np.ndarray]]]
"""Of which context, and what every head of every layer retained."""


class MemoryFolder(Folder):
    """A folder without files, some of which cannot be read.

    Args:
        random: Draws what goes wrong.
    """

    def __init__(self, random: Random) -> None:
        super().__init__(Path("/nowhere"))
        self.random, self.files = random, dict[Place, tuple[int, Stored]]()
        self.packed: dict[str, Packed] = {}
        self.num_written = 0

    def version(self, place: Place) -> tuple[int, int] | None:
        found = self.files.get(place)
        return None if found is None else (found[0], 0)

    def read(self, place: Place) -> Stored:
        if place not in self.files:
            raise FileNotFoundError(2, "it was removed")
        if self.random.random() < 0.2:
            raise FileError("it is damaged")
        return self.files[place][1]

    def write(self, stored: Stored) -> bool:
        self.num_written += 1
        self.files[stored.facts.place] = (self.num_written, stored)
        return True


class _Late(Future[Any]):
    """What is done after it was asked for a number of times."""

    def __init__(self, call: Callable[[], Any], num_asked: int) -> None:
        super().__init__()
        self._call, self._left = call, num_asked

    def done(self) -> bool:
        self._left -= 1
        return self._left < 0

    def result(self, timeout: float | None = None) -> Any:
        if not super().done():
            self.set_result(self._call())
        return super().result()


class LateExecutor:
    """Stands in for threads: the same draws give the same run."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def submit(self, call: Callable[..., Any], *args: Any) -> _Late:
        return _Late(lambda: call(*args), self.random.randrange(6))


class AtOnce(LateExecutor):
    """What is written is written: only the reading is of interest."""

    def submit(self, call: Callable[..., Any], *args: Any) -> _Late:
        late = _Late(lambda: call(*args), 0)
        late.result()
        return late


class TaggedStore:
    """The product's own `StoredContexts` over a cache of tags.

    Args:
        folder: The folder.
        cache: `[num_layers, num_blocks, num_kv_heads, block_size]`.
        state: Offsets of what is packed in it.
        packed_at: What is packed, by the first packed block.
    """

    def __init__(
        self,
        folder: MemoryFolder,
        cache: np.ndarray,
        state: RetentionState,
        packed_at: dict[int, Packed],
    ) -> None:
        self.folder, self.packed_at, self.state = folder, packed_at, state
        memory = torch.from_numpy(cache).flatten(0, 1)
        shape = Shape(len(cache), tuple(memory.shape[1:]), memory.dtype)
        transfers = Transfers(folder, 0, 1, "tags", shape, lambda numbers: numbers)
        transfers._readers = LateExecutor(folder.random)  # type: ignore[assignment]
        transfers._writer = AtOnce(folder.random)  # type: ignore[assignment]
        self.contexts = StoredContexts(memory, state, transfers)
        self.transfers = transfers
        self.num_loaded = self.num_failed = 0

    def load(self, output: SchedulerOutput) -> None:
        """What arrives is of the context that was written under its name."""
        waiting = {
            number: (each.load.name, each.load.block_ids[0])
            for number, each in self.transfers._reading.items()
        }
        self.contexts.load(output)
        for number, is_whole in self.contexts._loads.items():
            self.num_loaded, self.num_failed = (
                self.num_loaded + is_whole,
                self.num_failed + (not is_whole),
            )
            if is_whole:
                name, first = waiting.get(number) or self._begun(output, number)
                self.packed_at[first] = self.folder.packed[name]

    def save(self) -> None:
        """Notes what was packed beside the file."""
        for request, cut, *_ in self.state.completed:
            if request.stored_as is not None and cut is request.plan.context_cut:
                first = request.progress.swap.fresh[0]
                self.folder.packed[request.stored_as] = self.packed_at[first]
        self.contexts.save(self.state.completed)
        self.state.completed.clear()

    def report(self) -> StepReport:
        loads, *counts = self.contexts.take_news()
        return StepReport([], [], [], [], 0.0, 0, {}, loads, *counts)

    @staticmethod
    def _begun(output: SchedulerOutput, number: int) -> tuple[str, int]:
        notice: Any = output.kv_connector_metadata
        return notice.loads[number].name, notice.loads[number].block_ids[0]
