"""Every kernel compiles for every card that is accepted, and fits its shared memory.

Compiled are, in bfloat16, all of them at heads of 128 channels for each architecture, and at 64 and
256 those that multiply tiles, whose memory depends on it; all at each size for sm_89, which has the
least. What moves fp8 is compiled everywhere, what may read it from sm_89 on, and products of
float32 at 256 where there is least memory.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.compiled import SHARED_BYTES
from tests.kernels.test_triton import KERNELS
from vllm_kvselect.kernels.triton import products

pytestmark = [pytest.mark.xdist_group("shared memory"), pytest.mark.timeout(1000)]
"""One process does for all, and takes minutes on a busy machine."""

CARDS = (80, 89, 90, 100, 120)
"""Compute capabilities; 86 is compiled as 89 is, with the same memory."""
HALVES = ((80, 89, 120), (90, 100))


@pytest.fixture(scope="module")
def compiled(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, int]]:
    """Shared memory of each kernel on each card, compiled by two processes side by side.

    What Triton has compiled is kept from run to run, by its sources and by Triton's own.
    """
    kept = getattr(pytestconfig, "cache", None)
    folder = kept.mkdir("triton") if kept else tmp_path_factory.mktemp("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.compiled", *map(str, half)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for half in HALVES
    ]
    found: dict[int, dict[str, int]] = {}
    said = [run.communicate(timeout=900) for run in runs]
    for run, (printed, errors) in zip(runs, said, strict=True):
        assert run.returncode == 0, errors
        found |= {int(card): each for card, each in json.loads(printed.splitlines()[-1]).items()}
    return found


@pytest.mark.parametrize("card", CARDS)
def test_every_kernel_fits_the_shared_memory_of_a_card(
    card: int, compiled: dict[int, dict[str, int]]
) -> None:
    assert set(compiled[card]) == {
        f"{Path(str(module.__file__)).stem}.{name}"
        for module in KERNELS
        for name in vars(module)
        if name.endswith("_kernel")
    }
    # With room: another release of Triton may take a little more.
    assert max(compiled[card].values()) <= SHARED_BYTES[card] - 1024, compiled[card]


@pytest.mark.parametrize("limit", [99, 163, 227])
def test_tiles_of_shared_memory_follow_from_the_limit(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "shared_bytes", lambda: limit * 1024)
    assert products.tile_bytes() == (2**14 if limit == 99 else 2**15)
