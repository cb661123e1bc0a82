"""Launches of a step's cuts, see `whole_cuts.py`; what they take of the host, `cut_times.py`."""

import pytest

from tests.own_process import said_by

pytestmark = [pytest.mark.xdist_group("whole cuts"), pytest.mark.timeout(1000)]
"""One process does for all, and takes minutes on a busy machine."""

MOST = {
    "layer-probe": 40,
    "layer-keydiff": 40,
    "snapkv": 40,
    "adakv": 40,
    "pyramidkv": 40,
    "ada-pyramidkv": 40,
    "snapkv-perturb": 60,
    "adakv-perturb": 60,
    "thetakv": 60,
    "defensivekv": 60,
}
"""The most launches that a step's cuts may take."""

BY_REQUEST = ["knorm", "streaming-llm", "random", "r-kv"]
"""Methods whose scorers take layers side by side, request by request."""


@pytest.fixture(scope="module")
def counted() -> dict[str, list[int]]:
    """Launches of each method: of a few layers, of more, and of more requests."""
    found: dict[str, list[int]] = said_by("tests.engine.whole_cuts", *MOST, *BY_REQUEST)
    return found


@pytest.mark.parametrize("method", MOST)
def test_launches_of_cuts_are_counted(method: str, counted: dict[str, list[int]]) -> None:
    assert isinstance(counted[method], list), counted[method]
    assert min(counted[method]) > 10


@pytest.mark.parametrize("method", MOST)
def test_launches_of_cuts_do_not_grow_with_layers_and_requests(
    method: str, counted: dict[str, list[int]]
) -> None:
    few, more_layers, more_requests = counted[method]
    assert few == more_layers == more_requests <= MOST[method]


@pytest.mark.parametrize("method", BY_REQUEST)
def test_launches_of_scorers_by_request_do_not_grow_with_layers(
    method: str, counted: dict[str, list[int]]
) -> None:
    few, more_layers, more_requests = counted[method]
    assert 10 < few == more_layers < more_requests


def test_what_a_cut_takes_of_the_host_is_told() -> None:
    found = said_by("tests.engine.cut_times", "snapkv", "knorm")
    assert [*found] == ["snapkv", "knorm"]
    assert all(len(cases) == 2 and min(cases) > 0.05 for cases in found.values())
