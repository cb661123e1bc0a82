"""A build that was interrupted is no one's problem afterwards."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from vllm_kvselect.kernels import build, cpu


def test_a_guard_left_by_a_killed_process_is_not_waited_for(tmp_path: Path) -> None:
    cpu.load()
    name = build.build_name(torch.backends.cpu.get_cpu_capability())
    # With its times, so that ninja finds nothing to do.
    shutil.copytree(build.build_root() / name, tmp_path / name)
    guard = tmp_path / name / "lock"
    guard.touch()

    subprocess.run(
        [sys.executable, "-c", "from vllm_kvselect.kernels import cpu; cpu.load()"],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)},
        timeout=300,
        check=True,
    )

    assert not guard.exists()


def test_another_processor_has_another_build() -> None:
    assert build.build_name("AVX2") != build.build_name("AVX512")
