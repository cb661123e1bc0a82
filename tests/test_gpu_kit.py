"""The kit for a GPU, walked on the processor."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.xdist_group("gpu kit"), pytest.mark.timeout(1000)]
"""One process does for all, and takes minutes on a busy machine."""

ROOT = Path(__file__).parents[1]
RUN_ALL = str(ROOT / "benchmarks" / "gpu" / "run_all.py")
STEPS = ("kernels", "view", "tokens", "memory", "selection", "decode", "throughput")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kit itself is run")
def test_a_dry_run_walks_every_step_and_writes_its_table(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    table = tmp_path / "gpu.md"
    command = [sys.executable, RUN_ALL, "--dry-run", "--output", str(table)]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    lines = table.read_text().splitlines()
    assert "DRY RUN" in lines[0]
    assert lines[2:4] == ["| step | what | result |", "| --- | --- | --- |"]
    for step in STEPS:
        # More than that the step ended: what it found.
        assert sum(line.startswith(f"| {step} |") for line in lines) > (step != "kernels"), step


def test_nothing_is_measured_where_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = subprocess.run(
        [sys.executable, RUN_ALL], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode != 0
    assert "there is no GPU; nothing was proved or measured" in result.stderr
