"""Nothing is mixed with the host, and nothing read back; see `fake_device.py`."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
from tests.engine.fake_device import CANARIES, runs

pytestmark = [pytest.mark.xdist_group("fake device"), pytest.mark.timeout(1000)]
"""One process does for all, and takes minutes on a busy machine."""


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    """What a process with a device of its own says of each run."""
    command = [sys.executable, "-m", "tests.engine.fake_device"]
    result = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr
    said: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return said


@pytest.mark.parametrize("wrong", CANARIES)
def test_a_fake_device_finds_what_must_not_be_done(wrong: str, found: dict[str, object]) -> None:
    assert found[wrong]


@pytest.mark.parametrize("run", runs())
def test_requests_are_served_on_a_fake_device(run: str, found: dict[str, object]) -> None:
    assert isinstance(found[run], int), found[run]
    assert found[run] > 5
