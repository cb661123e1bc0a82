"""Children that take long to get ready, stand side by side, and are asked one after the other."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from threading import Timer
from typing import Any

from _engine import (
    CHILD_ARGUMENT,
    BenchmarkError,
    Job,
    child_environment,
    failed,
    reply_alone,
)

Row = dict[str, Any]
"""Of the report: `what` and `result` for people, and whatever numbers there are."""
Answers = Callable[[dict[str, Any]], Row]


class Child:
    """A script of the kit in a process of its own, with whatever that starts.

    Args:
        script: The file, which calls `run_child`.
        job: What it makes ready; see `child_environment`.
        small: Whether it is to take little: no process of the engine's own, one thread.
    """

    def __init__(self, script: str, job: Job, small: bool) -> None:
        # `end` closes it, after the child: no `with` for SIM115.
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        environment = child_environment(job) | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        if small:
            environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        self._process = subprocess.Popen(
            [sys.executable, script, CHILD_ARGUMENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
            start_new_session=True,  # what it starts ends with it
        )
        self._write(job)

    def ask(self, command: dict[str, Any], seconds: float) -> Row:
        """Lets it do something, and waits for what came out; see `answer`."""
        self._write(command)
        return self.answer(seconds)

    def answer(self, seconds: float) -> Row:
        """Waits for its next answer, of which the first says that it is ready.

        Raises:
            BenchmarkError: If it failed, or took longer and was ended; the message says why.
        """
        assert self._process.stdout is not None
        timer = Timer(max(0.0, seconds), self._kill)
        timer.start()
        line = self._process.stdout.readline()
        is_late = not timer.is_alive()
        timer.cancel()
        if line:
            return json.loads(line)
        if is_late:
            raise BenchmarkError(f"ended: it took more than {seconds:.0f} s")
        self._process.wait()
        self._log.seek(0)
        raise failed(self._log.read())

    def end(self) -> None:
        """Ends it, and waits until its memory is free."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(15)
        self._kill()  # what it has left behind
        self._process.wait()
        self._log.close()
        if self._process.stdout:
            self._process.stdout.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; `answer` says why
            print(json.dumps(message), file=self._process.stdin, flush=True)


def run_child(make_ready: Callable[[Job], tuple[Row, Answers]]) -> None:
    """The child's side: gets ready, then answers commands until there are no more.

    Args:
        make_ready: From the job to what is said of it, and what answers.
    """
    job = json.loads(sys.stdin.readline())
    with reply_alone() as reply:
        row, answers = make_ready(job)
        print(json.dumps(row), file=reply, flush=True)
        for line in sys.stdin:
            print(json.dumps(answers(json.loads(line))), file=reply, flush=True)
