"""A rank's files of contexts: they come and go in threads, pages between two steps.

Pages are copied out of the cache at the end of the step that packed them, and into it before a
forward pass, both by the thread that computes. All that takes long, the files, waits elsewhere.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_kvselect import __version__
from vllm_kvselect.engine.log import logger
from vllm_kvselect.engine.notice import Load
from vllm_kvselect.store.file import Facts, FileError, Place, Stored
from vllm_kvselect.store.folder import Folder, reason

_MOST_WAITING = 4
"""Contexts that wait to be written, each a copy in memory. What comes then is not stored."""

_MOST_SECONDS = 60.0
"""After that a file that is not read yet, of a folder that does not answer, is a miss."""

_IDLE_SECONDS = 0.005
"""How long a step that computes nothing waits for a file, so that no processor is kept busy."""

_FAILED, _READING, _READ = range(3)

Agree = Callable[[list[int]], list[int]]
"""Gives, of each number that the ranks have, the least one of all."""


class Shape(NamedTuple):
    """What the pages of a context must look like.

    Attributes:
        num_layers: Layers of the group.
        block: Shape of a block in a layer, `(num_kv_heads, page_size, 2 * head_size)`.
        dtype: Of the cache.
    """

    num_layers: int
    block: tuple[int, ...]
    dtype: torch.dtype

    def why_not(self, stored: Stored, num_blocks: int) -> str | None:
        """Why a context does not fit into so many blocks of this cache; None if it does."""
        pages, offsets = stored.pages, stored.offsets
        expected = (self.num_layers, num_blocks, *self.block)
        if tuple(pages.shape) != expected or pages.dtype != self.dtype:
            return f"it has {pages.dtype} pages of {tuple(pages.shape)}, not {expected}"
        num_kv_heads = self.block[0]
        if tuple(offsets.shape) != (self.num_layers, num_kv_heads + 1):
            return f"it has offsets of {tuple(offsets.shape)}"
        # A layer's last head ends where the first one of the next layer begins.
        runs = torch.cat([offsets[:, :-1].flatten(), offsets[-1:, -1]])
        is_run = torch.equal(offsets[:-1, -1], offsets[1:, 0]) and bool((runs.diff() >= 0).all())
        most = self.num_layers * num_blocks * num_kv_heads
        if not is_run or int(runs[0]) != 0 or not 0 < int(runs[-1]) <= most:
            return "its offsets are no run of pages"
        return None


@dataclass
class _Reading:
    load: Load
    future: "Future[Stored | None]"
    deadline: float


class Transfers:
    """Files of a rank, read and written in the background."""

    def __init__(
        self, folder: Folder, rank: int, num_ranks: int, model: str, shape: Shape, agree: Agree
    ) -> None:
        self._folder, self._rank, self._num_ranks = folder, rank, num_ranks
        self._model, self._shape, self._agree = model, shape, agree
        self._readers = ThreadPoolExecutor(2, "kvselect-read")
        self._writer = ThreadPoolExecutor(1, "kvselect-write")
        self._reading: dict[int, _Reading] = {}
        self._writing: list[Future[bool]] = []
        self._complaint = ""
        self.num_stored = self.num_not_stored = 0

    # Into the folder

    def may_save(self) -> bool:
        """Whether a context may be copied now; one that may not is not stored, which is counted."""
        self.count_written()
        if len(self._writing) < _MOST_WAITING:
            return True
        self.num_not_stored += 1
        self._complain("contexts come faster than they are written")
        return False

    def save(
        self, name: str, pages: torch.Tensor, offsets: torch.Tensor, num_tokens: int, method: str
    ) -> None:
        """Writes a `Stored` in the background; nobody else may write to its memory."""
        facts = Facts(
            written_by=__version__,
            name=name,
            rank=self._rank,
            num_ranks=self._num_ranks,
            model=self._model,
            method=method,
            num_tokens=num_tokens,
            num_blocks=pages.shape[1],
        )
        stored = Stored(pages, offsets, facts)
        self._writing.append(self._writer.submit(self._write, stored))

    def count_written(self) -> None:
        """Counts what was written since the last time."""
        for future in [future for future in self._writing if future.done()]:
            self._writing.remove(future)
            self.num_stored += future.result()
            self.num_not_stored += not future.result()

    def take_counts(self) -> tuple[int, int]:
        """Contexts that were stored, and that could not be, since the last time."""
        self.count_written()
        counts = self.num_stored, self.num_not_stored
        self.num_stored = self.num_not_stored = 0
        return counts

    def _write(self, stored: Stored) -> bool:
        """Runs in a thread; whatever fails, the server goes on."""
        try:
            if self._folder.write(stored):
                self._complaint = ""
                return True
            self._complain("a context takes more than context_store_bytes")
        except OSError as error:
            self._complain(reason(error))
        return False

    def _complain(self, why: str) -> None:
        """Says once why nothing is stored, until something is or the reason is another one."""
        if why != self._complaint:
            self._complaint = why
            logger.warning("A context was not stored in %s: %s", self._folder.path, why)

    # Out of the folder

    def begin(self, loads: Mapping[int, Load]) -> None:
        """Begins to read contexts."""
        for number, load in loads.items():
            future = self._readers.submit(self._read, load)
            self._reading[number] = _Reading(load, future, time.monotonic() + _MOST_SECONDS)

    def drop(self, numbers: Sequence[int]) -> None:
        """Forgets loads whose blocks are somebody else's now."""
        for number in numbers:
            if (reading := self._reading.pop(number, None)) is not None:
                reading.future.cancel()

    def arrived(self, is_idle: bool) -> Iterator[tuple[int, list[int], Stored | None]]:
        """Loads that all ranks have read, or one of them could not; an idle step may wait a little.

        Yields:
            A load's number, the blocks that wait, and what goes into them; None if it failed.
        """
        if not self._reading:
            return
        states = self._agree([self._state(self._reading[n], is_idle) for n in self._reading])
        for number, state in zip([*self._reading], states, strict=True):
            if state == _READING:
                continue
            reading = self._reading.pop(number)
            stored = reading.future.result() if state == _READ else None
            yield number, reading.load.block_ids, stored

    def _state(self, reading: _Reading, is_idle: bool) -> int:
        if is_idle and not reading.future.done():
            time.sleep(_IDLE_SECONDS / len(self._reading))
        if reading.future.done():
            return _FAILED if reading.future.result() is None else _READ
        return _READING if time.monotonic() < reading.deadline else _FAILED

    def _read(self, load: Load) -> Stored | None:
        """Runs in a thread; whatever is wrong with a file, it is a miss."""
        place = Place(load.name, self._rank, self._num_ranks)
        try:
            stored = self._folder.read(place)
        except (FileError, OSError) as error:
            problem: str | None = reason(error)
        else:
            problem = self._shape.why_not(stored, len(load.block_ids))
            if problem is None:
                return stored
        logger.warning("Stored context %s is not used: %s", place.file, problem)
        return None

    def close(self) -> None:
        """Waits for what is being written."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown()
