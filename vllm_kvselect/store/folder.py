"""A folder of compressed contexts that servers share: written beside and renamed, bounded, LRU.

Any number of processes and machines may use a folder at once. None of them holds a lock: a file is
complete when it has its name, and whoever finds one gone goes on without it.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from vllm_kvselect.config import ConfigError
from vllm_kvselect.store.file import FileError, Place, Stored

_UNFINISHED = ".unfinished"
_ABANDONED_SECONDS = 3600.0
"""After that nobody writes an unfinished file any more: its process was killed."""


class Entry(NamedTuple):
    """A file of a folder; `used` is when it was last read or written, in seconds since 1970."""

    path: Path
    place: Place
    num_bytes: int
    used: float


class Folder:
    """A folder of contexts, whose files may take so many bytes, or any number."""

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        self.path, self._max_bytes = path, max_bytes

    def make(self) -> None:
        """Makes the folder if there is none, for the user who runs the server alone.

        Raises:
            ConfigError: If there can be none.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.scandir(self.path):
                pass
        except OSError as error:
            raise ConfigError(
                f"context_store = {str(self.path)!r} is no folder that can be read "
                f"({error.strerror}); name another one"
            ) from None

    def version(self, place: Place) -> tuple[int, int] | None:
        """What tells a file from one that takes its place later; None without one."""
        try:
            found = (self.path / place.file).stat()
        except OSError:
            return None
        return found.st_ino, found.st_size

    def read(self, place: Place) -> Stored:
        """Reads a context, and takes note that it is of use.

        Raises:
            FileError: If the file is not taken, with the reason.
            OSError: If there is none, or it cannot be read.
        """
        path = self.path / place.file
        stored = Stored.read(path)
        with suppress(OSError):  # a folder that is only read keeps its own times
            os.utime(path)
        return stored

    def write(self, stored: Stored) -> bool:
        """Writes a context, complete or not at all; whether there was room.

        The least recently used ones make room.

        Raises:
            OSError: If it cannot be written.
        """
        num_bytes = stored.pages.nbytes + stored.offsets.nbytes + 4096  # with the header
        if self._max_bytes is not None:
            if num_bytes > self._max_bytes:
                return False
            self._shrink(self._max_bytes - num_bytes)
        path = self.path / stored.facts.place.file
        unfinished = self.path / f".{path.name}.{uuid4().hex}{_UNFINISHED}"
        try:
            stored.write(unfinished)
            unfinished.replace(path)
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
        return True

    def entries(self) -> list[Entry]:
        """Files of contexts, the least recently used one first."""
        found = []
        for path in self._paths():
            place = Place.of(path.name)
            with suppress(OSError):  # another process removed it
                facts = path.stat()
                if place is not None:
                    found.append(Entry(path, place, facts.st_size, facts.st_mtime))
        return sorted(found, key=lambda entry: entry.used)

    def _shrink(self, max_bytes: int) -> None:
        """Removes the least recently used contexts, with all of their ranks, and what was left."""
        self._remove_abandoned()
        contexts: dict[str, list[Entry]] = {}
        for entry in self.entries():
            contexts.setdefault(entry.place.name, []).append(entry)
        total = sum(entry.num_bytes for ranks in contexts.values() for entry in ranks)
        for ranks in sorted(contexts.values(), key=lambda ranks: ranks[-1].used):
            if total <= max_bytes:
                break
            total -= sum(entry.num_bytes for entry in ranks)
            self.remove(ranks)

    def remove(self, entries: Iterable[Entry]) -> int:
        """Removes files and counts them; what another process removed before is gone all the same.

        Raises:
            OSError: If one cannot be removed.
        """
        num_removed = 0
        for entry in entries:
            with suppress(FileNotFoundError):
                entry.path.unlink()
                num_removed += 1
        return num_removed

    def problem(self, place: Place) -> str | None:
        """Why a file is not taken; None if all of it is as it was written."""
        try:
            Stored.read(self.path / place.file)
        except (FileError, OSError) as error:
            return reason(error)
        return None

    def _paths(self) -> Iterator[Path]:
        with os.scandir(self.path) as found:
            yield from [Path(entry.path) for entry in found]

    def _remove_abandoned(self) -> None:
        for path in self._paths():
            if path.name.startswith(".") and path.name.endswith(_UNFINISHED):
                with suppress(OSError):
                    if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                        path.unlink()


def reason(error: FileError | OSError) -> str:
    """Why a file is not taken, or not written, without its path."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)
