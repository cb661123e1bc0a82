"""Attention sinks: a tiny gpt-oss, whose query heads have a logit of their own in every softmax."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.all_methods import (
    METHODS,
    Served,
    check_method,
    check_nothing_dropped_is_stock,
    engines_of,
    serve_all_methods,
)
from tests.engine.conftest import EngineFactory
from tests.engine.random_models import random_gpt_oss

pytestmark = pytest.mark.xdist_group("sinks")


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_gpt_oss(tmp_path_factory.mktemp("gpt-oss"))


@pytest.fixture(scope="module")
def start(gpt_oss: Path) -> Iterator[EngineFactory]:
    with engines_of(gpt_oss) as start:
        yield start


@pytest.fixture(scope="module")
def served(start: EngineFactory) -> Served:
    return serve_all_methods(start)


@pytest.mark.parametrize("index", range(len(METHODS)), ids=METHODS)
def test_sinks_count_in_scores_and_in_attention(index: int, served: Served, gpt_oss: Path) -> None:
    check_method(index, served, gpt_oss, full_attention=[1, 3])


def test_nothing_dropped_is_stock(start: EngineFactory) -> None:
    check_nothing_dropped_is_stock(start)
