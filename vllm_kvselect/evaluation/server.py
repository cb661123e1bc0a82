"""Runs `vllm serve` as a user starts it, for as long as it is needed."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple

from rich.console import Console

from vllm_kvselect.offline.errors import EvaluationError

STARTUP_SECONDS = 600.0
_GRACE_SECONDS = 30.0
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process without unwinding it; Ctrl-C, SIGINT, unwinds by itself."""

_ERROR = re.compile(r"(?:\(\w+ pid=\d+\) ERROR [^\]]*\] )?[\w.]*Error: ")
"""How a line of vLLM's log begins that says what went wrong."""


class Server(NamedTuple):
    """A running server, and the process that was started; the engine's are its children."""

    url: str
    pid: int


def plugin_environment() -> dict[str, str]:
    """This process's environment with vLLM's general plugins as installed."""
    return {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}


@contextlib.contextmanager
def serving(
    console: Console,
    name: str,
    model: str,
    flags: list[str],
    environment: dict[str, str],
    log: Path | None = None,
) -> Iterator[Server]:
    """Runs a server on a free port of the loopback interface, with further flags of `vllm serve`.

    The console shows under a name what is waited for. What the server says goes into `log`; by
    default it is gone with it.

    Raises:
        EvaluationError: If it does not come up; the message holds what its log says of that.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [vllm_command(), "serve", model, "--host", "127.0.0.1", "--port", str(port), *flags]
    with running(console, name, command, f"{url}/health", environment, log) as pid:
        yield Server(url, pid)


@contextlib.contextmanager
def running(
    console: Console,
    name: str,
    command: list[str],
    health_url: str,
    environment: dict[str, str],
    log: Path | None = None,
) -> Iterator[int]:
    """Runs a command that serves, with whatever it starts itself, until the block ends.

    It serves once `health_url` answers. However the block ends, by Ctrl-C or SIGTERM too, no
    process is left behind. Gives its process id; arguments are as in `serving`.

    Raises:
        EvaluationError: As `serving`.
    """
    with _unwinding_when_ended(), _opened(log) as file:
        # A session of its own: Ctrl-C reaches this process alone, which then stops the server and
        # whatever the server has started.
        server = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, start_new_session=True
        )
        try:
            with console.status(f"{name}: starting vllm serve (about a minute)"):
                _wait_until_ready(server, health_url, file, log)
            yield server.pid
        finally:
            with console.status(f"{name}: stopping"):
                _stop_group(server)


def vllm_command() -> str:
    """Returns the `vllm` of this Python, also when its environment is not the active one."""
    beside = Path(sys.executable).with_name("vllm")
    return str(beside) if beside.exists() else "vllm"


def tail(text: str, num_lines: int = 30) -> str:
    """Returns the last lines of a log."""
    return "\n".join(text.rstrip().splitlines()[-num_lines:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _opened(log: Path | None) -> IO[str]:
    if log is None:
        return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
    return log.open("w+", encoding="utf-8", errors="replace")


@contextlib.contextmanager
def _unwinding_when_ended() -> Iterator[None]:
    """Lets signals that end this process run the `finally` blocks that it is in.

    A signal that is ignored stays so: under `nohup`, a closed terminal ends nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python takes signals in its main thread only
        return

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    heeded = [n for n in _ENDING_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_until_ready(
    server: "subprocess.Popen[bytes]", url: str, file: IO[str], log: Path | None
) -> None:
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
    file.seek(0)
    text = file.read()
    said = f"its log ends:\n{tail(text)}" if log is None else f"{first_error(text)}; see {log}"
    raise EvaluationError(f"vllm serve {reason}; {said}")


def first_error(text: str) -> str:
    """The first error in a log, with the line after it, or its end: more errors follow from one."""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if _ERROR.match(line):
            return "\n".join(lines[index : index + 2])
    return f"its log ends:\n{tail(text)}"


def _stop_group(server: "subprocess.Popen[bytes]") -> None:
    """Asks the server to end, then ends whatever of its processes is still there.

    Who is interrupted again while it waits does not wait any longer.
    """
    try:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_GRACE_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
