"""The memory of a test process is told in the end, and what tests freed is given back."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TAKES_MEMORY = """
def test_it():
    assert len(bytearray(300 << 20)) > 0
"""
FREES_MEMORY = """
from tests.process_memory import status_mib
from vllm_kvselect.engine.cpu.allocator import keep_freed_memory

def test_it_frees_what_the_library_keeps():
    assert keep_freed_memory()
    assert len([bytes(1 << 20) for _ in range(300)]) == 300
    assert status_mib("VmRSS") > 300

def test_it_is_gone():
    assert status_mib("VmRSS") < 300
"""
LIMITED = """
from tests import process_memory as memory
memory.MOST_MIB = {most}
def pytest_configure(config):
    config.pluginmanager.register(memory)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells the peak")
@pytest.mark.parametrize(("most", "status"), [(100_000, 0), (200, 1)])
@pytest.mark.parametrize("processes", [[], ["-n", "1"]])
def test_a_run_that_takes_too_much_fails(
    most: int, status: int, processes: list[str], tmp_path: Path
) -> None:
    result = run(TAKES_MEMORY, most, processes, tmp_path)
    assert result.returncode == status, result.stdout + result.stderr
    found = re.search(r"most memory of (.*): ([\d,]+) MiB", result.stdout)
    assert found is not None
    assert found[1] == ("gw0" if processes else "this process")
    assert int(found[2].replace(",", "")) >= 300


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps it")
def test_what_tests_freed_is_given_back(tmp_path: Path) -> None:
    result = run(FREES_MEMORY, 100_000, [], tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


def run(
    source: str, most: int, processes: list[str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Runs tests with the plugin and another limit, in MiB."""
    (folder / "test_it.py").write_text(source)
    (folder / "conftest.py").write_text(LIMITED.format(most=most))
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:randomly", "-c", os.devnull, *processes, "."],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
