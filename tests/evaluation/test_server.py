"""Servers and whatever they start are gone, however an evaluation ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from rich.console import Console

from vllm_kvselect.evaluation import server
from vllm_kvselect.evaluation.server import running
from vllm_kvselect.offline.errors import EvaluationError

STUBBORN = Path(__file__).with_name("stubborn.py")
# Signals as in a terminal, whatever this process has inherited: `nohup` and a shell's background
# jobs ignore some of them.
WAITING = """
import signal, sys, time
from tests.evaluation.test_server import start
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL if "hang up" in sys.argv else signal.SIG_IGN)
with start(*sys.argv[1:3]):
    print("ready", flush=True)
    time.sleep(1000)
"""


def start(port: str, name: str):  # type: ignore[no-untyped-def]
    """Runs the stubborn server; its processes have the name on their command lines."""
    command = [sys.executable, str(STUBBORN), port, name]
    url = f"http://127.0.0.1:{port}/health"
    return running(Console(stderr=True), name, command, url, dict(os.environ))


@pytest.fixture
def port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def name() -> str:
    return uuid4().hex


def processes(name: str) -> list[psutil.Process]:
    """Processes of the stubborn server, not of who started it."""
    named = psutil.process_iter(["cmdline"])
    return [
        each
        for each in named
        if {str(STUBBORN), name} <= {*(each.info["cmdline"] or ())}
        and each.status() != psutil.STATUS_ZOMBIE
    ]


def is_gone(name: str) -> bool:
    deadline = time.monotonic() + 10
    while processes(name) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not processes(name)


def test_a_server_that_does_not_end_is_ended_with_its_children(
    port: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_GRACE_SECONDS", 0.5)
    with start(port, name) as pid:
        found = processes(name)
        assert pid in {each.pid for each in found}
        assert len(found) == 2
    assert is_gone(name)


@contextmanager
def waiting_for_a_server(
    port: str, name: str, *options: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that waits while its server runs; neither outlives the block."""
    script = [sys.executable, "-c", WAITING, port, name, *options]
    with subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as waiting:
        try:
            assert waiting.stdout is not None
            assert waiting.stdout.readline() == b"ready\n"
            yield waiting
        except BaseException:
            for each in processes(name):
                each.kill()
            raise
        finally:
            waiting.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_nothing_behind(number: signal.Signals, port: str, name: str) -> None:
    with waiting_for_a_server(port, name, "hang up") as waiting:
        assert len(processes(name)) == 2
        waiting.send_signal(number)
        time.sleep(1)
        assert waiting.poll() is None, "it waits for the server, which does not end"
        waiting.send_signal(number)
        status = waiting.wait(10)
    assert status == (-number if number is signal.SIGINT else 128 + number)
    assert is_gone(name)


def test_who_ignores_that_the_terminal_closes_goes_on(port: str, name: str) -> None:
    with waiting_for_a_server(port, name) as waiting:
        waiting.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert len(processes(name)) == 2
        for _ in range(2):  # the second time it does not wait for the server, which does not end
            waiting.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        assert waiting.wait(10) == 128 + signal.SIGTERM
    assert is_gone(name)


REASON = "(Worker pid=7) ERROR 11-23 01:15:53 [executor.py:1063] ValueError: too little memory"


@pytest.mark.parametrize("reason", ["", REASON])
@pytest.mark.parametrize("keeps_log", [True, False])
def test_a_server_that_ends_at_once_is_an_error_with_the_reason(
    reason: str, keeps_log: bool, tmp_path: Path
) -> None:
    log = tmp_path / "log" if keeps_log else None
    lines = [f"line {index}" for index in range(100)]
    lines += [reason, "Take more.", *lines[:50], "RuntimeError: see above"] if reason else []
    script = f"print({chr(10).join(lines)!r}); raise SystemExit(7)"
    command, url = [sys.executable, "-c", script], "http://127.0.0.1:9/health"
    with (
        pytest.raises(EvaluationError, match="ended with status 7 before it was ready") as caught,
        running(Console(stderr=True), "it", command, url, dict(os.environ), log),
    ):
        pytest.fail("it never served")
    _, message = str(caught.value).split("; ", 1)
    if log is not None:
        message, path = message.split("; see ")
        assert path == str(log)
        assert log.read_text().splitlines() == lines
    if log is not None and reason:
        assert message.splitlines() == [reason, "Take more."]
    else:
        assert message.splitlines() == ["its log ends:", *lines[-30:]]


def test_one_that_never_answers_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STARTUP_SECONDS", 1.0)
    monkeypatch.setattr(server, "_GRACE_SECONDS", 0.5)
    with pytest.raises(EvaluationError, match="was not ready after 1 s"), start("0", name):
        pytest.fail("it never served")
    assert is_gone(name)
