"""Tests that start an engine are marked, however they come to start one."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import marks
from tests.marks import reaches_engine, starts_engine


@starts_engine
def start() -> str:
    return "started"


def helper() -> str:
    return start()


class Served:
    def answer(self) -> str:
        return helper()


def of_a_class() -> str:
    return Served().answer()


def in_a_nested_function() -> Any:
    def nested() -> Any:
        return partial(start)

    return nested


def through_a_module() -> Any:
    return marks.starts_engine, marks._STARTERS  # by name: nothing of it starts one


@given(st.booleans())
def drawn(_: bool) -> None:
    helper()


def goes_round(number: int) -> int:
    return number and goes_round(number - 1)


def test_code_that_names_what_starts_one_reaches_it() -> None:
    for function in (start, helper, Served, of_a_class, in_a_nested_function, drawn):
        assert reaches_engine(function), function
    assert reaches_engine(partial(helper))


def test_other_code_does_not() -> None:
    for function in (through_a_module, goes_round, pytest.fail, 7, None):
        assert not reaches_engine(function), function


def test_without_the_mark_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    (item,) = marks._current
    assert item.get_closest_marker("engine") is not None
    assert start() == "started"

    class Unmarked:
        nodeid = "tests/test_it.py::test_it"

        def get_closest_marker(self, name: str) -> None:
            return None

    monkeypatch.setattr(marks, "_current", [Unmarked()])
    with pytest.raises(pytest.fail.Exception, match="test_it starts an engine, and is not marked"):
        start()


def test_every_test_with_an_engine_has_the_mark(request: pytest.FixtureRequest) -> None:
    """Whatever the fixtures are called: those of the engine's tests start one."""
    fixtures = {"share_engine", "start_engine", "start_full_engine"}
    for item in request.session.items:
        if fixtures & set(item.fixturenames):  # type: ignore[attr-defined]
            assert item.get_closest_marker("engine") is not None, item.nodeid
