"""A start that is refused ends with one line: the reason and what to do.

vLLM shows what fails at its start as tracebacks, one from every process that takes part. What a
command refuses in its own process is shown as one line instead. What one of its workers refuses
reaches the command through a note, a small file, so that the reason is the last line here too.
"""

import atexit
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from vllm.config import VllmConfig

from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.log import logger

Params = ParamSpec("Params")
Result = TypeVar("Result")
ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@dataclass
class OneLine:
    """Shows uncaught refusals as one line; a `sys.excepthook`, which all other errors go on to.

    Workers of this command's engines write into the notes why they refuse.
    """

    before: ExceptHook
    notes: list[Path] = field(default_factory=list)

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Shows an error that nobody caught; the traceback of a refusal is there at debug level."""
        reason = str(error) if isinstance(error, ConfigError) else self._noted()
        if not reason:
            self.before(kind, error, trace)
            return
        logger.debug("The start was refused.", exc_info=(kind, error, trace))
        sys.stderr.write(f"{Path(sys.argv[0]).name}: error: {one_line(reason)}\n")

    def _noted(self) -> str:
        """What a worker refused; every rank says the same, so the first line is enough."""
        notes = [path.read_text(encoding="utf-8") for path in self.notes if path.exists()]
        return next(filter(None, notes), "").partition("\n")[0]


def one_line(text: object) -> str:
    """A message as one line."""
    return " ".join(str(text).split())


def sentences(text: str, reasons: Mapping[str, object]) -> list[str]:
    """A problem in words for each reason that holds, put into a text."""
    return [text.format(reason) for reason, holds in reasons.items() if holds]


def end_with_one_line() -> None:
    """Shows refusals of this process, which runs a command, as one line from now on.

    A program that uses vLLM as a library sees `ConfigError`, with its traceback.
    """
    if not isinstance(sys.excepthook, OneLine):
        sys.excepthook = OneLine(sys.excepthook)


def expect_note(vllm_config: VllmConfig) -> None:
    """Makes the file for the workers of an engine, where a command starts it."""
    if not isinstance(sys.excepthook, OneLine):
        return
    path = _note(vllm_config)
    with suppress(OSError):  # without a note the reason stands among the tracebacks
        path.touch(0o600, exist_ok=False)
        sys.excepthook.notes.append(path)
        atexit.register(path.unlink, missing_ok=True)


def notes_refusals(method: Callable[Params, Result]) -> Callable[Params, Result]:
    """Decorates a method of a worker: if it refuses, the command that waits for a note gets one."""

    @functools.wraps(method)
    def noting(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        try:
            return method(*args, **kwargs)
        except ConfigError as error:
            worker: Any = args[0]
            _write(_note(worker.vllm_config), one_line(error))
            raise

    return noting


def _write(note: Path, line: str) -> None:
    """Adds a line, if the command made the file: the folder is everybody's, so nothing else is."""
    with suppress(OSError):
        descriptor = os.open(note, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{line}\n")


def _note(vllm_config: VllmConfig) -> Path:
    """The file of an engine, whose id every process knows."""
    return Path(tempfile.gettempdir()) / f"vllm-kvselect-{vllm_config.instance_id}"
