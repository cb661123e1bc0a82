"""Nothing is mixed with the host, and nothing read back; see `fake_device.py`."""

import pytest

pytest.importorskip("triton")
from tests.engine.fake_device import CANARIES, runs
from tests.own_process import said_by

pytestmark = [pytest.mark.xdist_group("fake device"), pytest.mark.timeout(1000)]
"""One process does for all, and takes minutes on a busy machine."""


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    """What a process with a device of its own says of each run."""
    said: dict[str, object] = said_by("tests.engine.fake_device")
    return said


@pytest.mark.parametrize("wrong", CANARIES)
def test_a_fake_device_finds_what_must_not_be_done(wrong: str, found: dict[str, object]) -> None:
    assert found[wrong]


@pytest.mark.parametrize("run", runs())
def test_requests_are_served_on_a_fake_device(run: str, found: dict[str, object]) -> None:
    assert isinstance(found[run], int), found[run]
    assert found[run] > 5
