"""A peer at work in its own environment: jobs go in and answers come back, as lines of JSON."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import vllm_kvselect
from peers.environment import python_of
from vllm_kvselect.evaluation.server import tail
from vllm_kvselect.offline.errors import EvaluationError

VISIBLE = tuple(Path(each).resolve().parent for each in (vllm_kvselect.__file__, __file__))
"""What workers import needs no installation in their environments."""
WORKERS = Path(__file__).with_name("workers")


class Worker:
    """A process that answers one job after the other; `lines.py` is its other side.

    Args:
        environment: Folder of the virtual environment that it runs in.
        script: Its file, in `workers/`.
    """

    def __init__(self, environment: Path, script: str) -> None:
        # Nothing else that lies beside these here may be found.
        self._beside = tempfile.TemporaryDirectory()
        for folder in VISIBLE:
            Path(self._beside.name, folder.name).symlink_to(folder, target_is_directory=True)
        # `__exit__` closes it, after the child: no `with` for SIM115.
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._child = subprocess.Popen(
            [python_of(environment), WORKERS / script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": self._beside.name},
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stop(self._child)
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # what it was not sent any more
                pipe.close()
        self._log.close()
        self._beside.cleanup()

    def ask(self, job: dict[str, Any]) -> Iterator[Any]:
        """Yields the answers to a job as they come.

        Raises:
            EvaluationError: If the worker failed; the message holds the end of its log.
        """
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with suppress(BrokenPipeError):  # it has ended; below is said why
            print(json.dumps(job), file=self._child.stdin)
        for line in self._child.stdout:
            answer = json.loads(line)
            if answer is None:
                return
            yield answer
        self._child.wait()
        self._log.seek(0)
        raise EvaluationError(f"the peer's process failed; its log ends:\n{tail(self._log.read())}")


def stop(process: "subprocess.Popen[str]", grace: float = 20.0) -> None:
    """Ends a process that may still run; vLLM's own children end with it."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
