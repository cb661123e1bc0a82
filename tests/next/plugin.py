"""What of the suite runs on a release of vLLM that is only unpacked, and what does not, and why.

A pytest plugin, loaded by `python -m tests.next`. Everything runs but for what is named here. What
is named is skipped with its reason, and must exist.
"""

from collections import Counter
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.next.__main__ import FOLDER, RELEASE
from tests.slow import function_of

ENGINE = "starts an engine, whose layers call vLLM's compiled operators"
KERNEL = "calls vLLM's compiled CPU attention"
OURS = "asks of kernels, or of tests, what no release of vLLM changes"

NOT_RUN = {
    "tests/engine/test_cpu_pages.py": KERNEL,
    "tests/engine/test_cpu_schedules.py": KERNEL,
    **dict.fromkeys(
        (
            "tests/engine/test_cuda_backend.py::test_every_step_is_that_of_the_oracle_with_the_kernels",
            "tests/engine/test_cuda_rounds.py::test_every_step_is_that_of_the_oracle_with_the_kernels",
            "tests/engine/test_cuda_specialisation.py",
            "tests/engine/test_decode_steps.py",
            "tests/engine/test_loads.py::test_a_mutant_is_found",
            "tests/engine/test_machine_mutants.py",
            "tests/engine/test_whole_cuts.py",
        ),
        OURS,
    ),
}
"""Modules, and tests of modules, by what they need; beside them all that is marked `engine`."""


def pytest_sessionstart(session: pytest.Session) -> None:
    import vllm

    if vllm.__version__ != RELEASE or not Path(vllm.__file__).is_relative_to(FOLDER):
        pytest.exit(f"this would test vLLM {vllm.__version__} of {vllm.__file__}", returncode=4)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if reason := reason_against(item):
            item.add_marker(pytest.mark.skip(reason=reason))


def reason_against(item: pytest.Item) -> str | None:
    """Why a test is not run, or None."""
    if item.get_closest_marker("engine"):
        return ENGINE
    function = function_of(item.nodeid)
    return NOT_RUN.get(function.partition("::")[0]) or NOT_RUN.get(function)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how much was run, and by name what of the release cannot even be imported."""
    counts = Counter[str]()
    for report in terminalreporter.stats.get("skipped", []):
        _, _, reason = report.longrepr
        counts[reason.removeprefix("Skipped: ")] += 1
    terminalreporter.section(f"vLLM {RELEASE}, its Python only")
    for reason, count in counts.most_common():
        terminalreporter.write_line(f"not run, {count}: {reason}")
    recorded = (distribution("vllm").read_text("RECORD") or "").splitlines()
    files = [line.partition(",")[0] for line in recorded]
    terminalreporter.write_line("compiled, so neither unpacked nor imported:")
    for name in sorted(name for name in files if name.endswith(".so")):
        terminalreporter.write_line(f"  {name}")
