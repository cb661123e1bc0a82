"""Triton compiles nothing while requests are served; see `specialisation.py`."""

import pytest

from tests.engine.cuda_traffic import SERVERS
from tests.own_process import said_by

pytestmark = [pytest.mark.xdist_group("specialisation"), pytest.mark.timeout(1000)]
"""One process does for all, and takes minutes on a busy machine."""


@pytest.fixture(scope="module")
def recorded() -> dict[str, tuple[int, list[str]]]:
    """For each server the number of keys that its warm-up made, and those that traffic added."""
    settings = {"TRITON_INTERPRET": "0", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    found: dict[str, tuple[int, list[str]]] = said_by(
        "tests.engine.specialisation", timeout=300, **settings
    )
    return found


@pytest.mark.parametrize("server", SERVERS)
def test_the_warm_up_makes_every_specialisation_that_traffic_asks_for(
    server: str, recorded: dict[str, tuple[int, list[str]]]
) -> None:
    num_known, added = recorded[server]
    assert num_known > 5
    assert added == []
