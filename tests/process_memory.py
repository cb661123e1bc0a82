"""Says how much memory each test process took, and fails a run in which one took too much.

A pytest plugin, taken in by `tests/conftest.py`. Between tests it gives back what they freed: an
engine on CPU tells the process's C library to keep up to 2 GiB of that.
"""

import contextlib
import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest

MOST_MIB = 4096
"""Of one test process. Two, and a server that tests talk to, then fit into 12 GiB.

A whole run took 2.8 GiB on one machine. On another it can take more: what one holds grows with the
tests it has run, and which of two gets the largest engines, and when, depends on their speed.
"""

_TRIMMED_AT_MIB = 128
"""Growth after which memory is given back. That takes a tenth of a second: not after every test."""

_peaks: dict[str, int] = {}
_size_mib = 0  # after the last time that memory was given back


def pytest_collection_finish() -> None:
    """Modules stay until the end: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logfinish() -> None:
    global _size_mib
    if status_mib("VmRSS") > _size_mib + _TRIMMED_AT_MIB:
        give_back_freed_memory()
        _size_mib = status_mib("VmRSS")


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput"):
        config.workeroutput["peak_mib"] = peak_mib()  # type: ignore[attr-defined]
    elif not getattr(config.option, "numprocesses", None):
        _peaks["this process"] = peak_mib()
    if session.exitstatus == pytest.ExitCode.OK and max(_peaks.values(), default=0) > MOST_MIB:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Of pytest-xdist: a process has ended."""
    if peak := getattr(node, "workeroutput", {}).get("peak_mib"):
        _peaks[node.gateway.id] = peak


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, peak in _peaks.items():
        too_much = f", more than the {MOST_MIB:,} it may take" if peak > MOST_MIB else ""
        line = f"most memory of {name}: {peak:,} MiB{too_much}"
        terminalreporter.write_line(line, red=bool(too_much))


def give_back_freed_memory() -> None:
    """Returns memory that nothing in this process uses to the kernel, where that can be asked."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def peak_mib() -> int:
    """The most memory that this process has held, or 0 where that cannot be told."""
    return status_mib("VmHWM")


def status_mib(name: str) -> int:
    """A size in the kernel's words, or 0 where it cannot be told."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) // 1024
    return 0
