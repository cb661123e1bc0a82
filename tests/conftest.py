"""Settings of the whole suite: one thread per process, since two test processes share two cores."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--machine-steps",
        type=int,
        default=0,
        help="run the state machine of tests/engine/test_machine.py for so many steps, at random",
    )
