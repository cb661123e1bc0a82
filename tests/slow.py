"""Marks as `slow` the test functions that `slow.txt` names; it is measured, not written.

A pytest plugin, taken in by `tests/conftest.py`. `make test ARGS=--measure` writes the file. What
has become slow without being named there is told at the end of every run.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("slow.txt")
HEADER = """\
# Written by `make test ARGS=--measure`: the test functions of which all cases together take more
# than {seconds} s. Tests that start an engine are not listed.
"""

MOST_SECONDS = 0.7
"""Of a fast function with all of its cases. Two cores run 700 such functions in half a minute."""

FORGOTTEN_SECONDS = 5.0
"""Of a case that is not marked: longer than a fast one takes on a slow machine."""

_seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
"""Of every case, by function."""
_marked: set[str] = set()
_measured: list[bool] = []

_MARK = "is marked slow or engine"


def named() -> list[str]:
    """The functions in the file."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def function_of(nodeid: str) -> str:
    """The test function of a case; xdist writes a group behind a case's name."""
    path, _, name = nodeid.partition("::")
    return f"{path}::{name.partition('[')[0].partition('@')[0]}"


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--measure", action="store_true", help=f"write {FILE.relative_to(ROOT)}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    slow = set(named())
    for item in items:
        if function_of(item.nodeid) in slow:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> object:
    outcome = yield
    # Keywords of a report do not tell marks from the names of folders, of which `engine` is one.
    marks = {mark.name for mark in item.iter_markers()}
    outcome.get_result().user_properties.append((_MARK, " ".join(marks & {"engine", "slow"})))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Runs in the process that talks to people, whichever ran the test."""
    function = function_of(report.nodeid)
    marks = str(dict(report.user_properties).get(_MARK, ""))
    if "engine" not in marks:
        _seconds[function][report.nodeid] += report.duration
    if marks:
        _marked.add(function)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.getoption("--measure"):
        found = [name for name, cases in _seconds.items() if is_slow(list(cases.values()))]
        header = HEADER.format(seconds=MOST_SECONDS)
        not_run = [name for name in named() if name not in _seconds]
        FILE.write_text(header + "".join(f"{each}\n" for each in sorted({*found, *not_run})))
        return
    for function, cases in _seconds.items():
        if function not in _marked and max(cases.values()) > FORGOTTEN_SECONDS:
            line = f"slow without being named in {FILE.relative_to(ROOT)}: {function}"
            terminalreporter.write_line(line, yellow=True)


def is_slow(seconds: Sequence[float]) -> bool:
    """Whether a function whose cases took so long is slow."""
    return sum(seconds) > MOST_SECONDS
