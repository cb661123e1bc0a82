"""Engines that are alive together and work in turns, each in a process that waits to be asked.

On a shared machine the same step takes 35 ms in one second and 50 in the next. Engines that run one
after the other meet different seconds; in turns of a few steps they share them. An engine steps in
the child's own process, since vLLM's usual engine process would go on while another one has its
turn.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from _engine import (
    CHILD_ARGUMENT,
    Job,
    child_environment,
    failed,
    reply_alone,
)
from peers.worker import stop

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class TurnTaker:
    """A child of the calling script that works only when it is asked, until its next answer.

    Args:
        script: File of the calling script, which hands its children to `answer_in_turns`.
        job: The child's job; without an `eviction` mapping the plugin is not even loaded.
        environment: What its environment has besides.
    """

    def __init__(self, script: str, job: Job, environment: Mapping[str, str] | None = None) -> None:
        # `__exit__` closes it, after the child: no `with` for SIM115.
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._child = subprocess.Popen(
            [sys.executable, script, CHILD_ARGUMENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=child_environment(job) | IN_PROCESS | dict(environment or {}),
            text=True,
            bufsize=1,
        )
        self._write(json.dumps(job))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stop(self._child)
        self._log.close()

    def turn(self) -> Any:
        """Lets the child work until its next answer, and returns that.

        Raises:
            BenchmarkError: If the child failed; the message says why.
        """
        self._write("")
        assert self._child.stdout is not None
        if line := self._child.stdout.readline():
            return json.loads(line)
        self._child.wait()
        self._log.seek(0)
        raise failed(self._log.read())

    def _write(self, line: str) -> None:
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; `turn` says why
            print(line, file=self._child.stdin)


def answer_in_turns(answers: Callable[[Job], Iterator[Any]]) -> None:
    """The child's side: computes an answer for every line that comes in, after the job's own.

    Args:
        answers: What the child does with its job.
    """
    job = json.loads(sys.stdin.readline())
    coming = answers(job)
    with reply_alone() as reply:
        for _ in sys.stdin:
            print(json.dumps(next(coming)), file=reply, flush=True)
