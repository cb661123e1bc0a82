"""Runs `vllm serve` as a user starts it, for as long as a benchmark needs it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from _engine import BenchmarkError, tail
from rich.console import Console

STARTUP_SECONDS = 600.0


class Server(NamedTuple):
    """A running server.

    Attributes:
        url: Its address.
        pid: The process that was started; the engine's are its children.
    """

    url: str
    pid: int


@contextlib.contextmanager
def serving(
    console: Console, name: str, model: str, flags: list[str], environment: dict[str, str]
) -> Iterator[Server]:
    """Runs a server on a free port of the loopback interface.

    Args:
        console: Shows what is being waited for.
        name: What to call the server there.
        model: Model folder.
        flags: Further arguments of `vllm serve`.
        environment: The server's environment.

    Raises:
        BenchmarkError: If it does not come up; the message holds the end of its log.
    """
    port = _free_port()
    command = [vllm_command(), "serve", model, "--host", "127.0.0.1", "--port", str(port), *flags]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        # A session of its own: Ctrl-C reaches this script alone, which then stops the server and
        # whatever the server has started.
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            with console.status(f"{name}: starting vllm serve (about a minute)"):
                _wait_until_ready(server, log, f"http://127.0.0.1:{port}/health")
            yield Server(f"http://127.0.0.1:{port}", server.pid)
        finally:
            with console.status(f"{name}: stopping"):
                _stop_group(server)


def vllm_command() -> str:
    """Returns the `vllm` of this Python, also when its environment is not the active one."""
    beside = Path(sys.executable).with_name("vllm")
    return str(beside) if beside.exists() else "vllm"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_ready(server: "subprocess.Popen[bytes]", log: IO[str], url: str) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)
    reason = (
        f"was not ready after {STARTUP_SECONDS:.0f} s"
        if server.poll() is None
        else f"ended with status {server.returncode} before it was ready"
    )
    log.seek(0)
    raise BenchmarkError(f"vllm serve {reason}; its log ends:\n{tail(log.read())}")


def _stop_group(server: "subprocess.Popen[bytes]", grace: float = 30.0) -> None:
    """Asks the server to end, then ends whatever of its processes is still there."""
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
