"""Marks as `engine` what starts one.

A pytest plugin, taken in by `tests/conftest.py`.

`engine` is put on every test that can reach something which starts a vLLM engine or a server: by
its own code, its fixtures', or that of the helpers which these name. So nobody has to remember it.
What starts one says so with `@starts_engine`, and refuses to run for a test without the mark.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T", bound=Callable[..., Any])

_STARTERS = {"vllm.entrypoints.llm.LLM", "vllm_kvselect.evaluation.server.serving"}
"""What is not ours to decorate."""

_current: list[pytest.Item] = []


def starts_engine(function: T) -> T:
    """Decorates what starts an engine or a server, in this process or another."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if _current and _current[-1].get_closest_marker("engine") is None:
            pytest.fail(f"{_current[-1].nodeid} starts an engine, and is not marked `engine`")
        return function(*args, **kwargs)

    guarded.starts_engine = True  # type: ignore[attr-defined]
    return guarded  # type: ignore[return-value]


def reaches_engine(function: Any, seen: set[int] | None = None) -> bool:
    """Whether a function's code, or that of the tests' helpers it names, starts an engine.

    Args:
        function: A function, a class, or anything that stands in for one.
        seen: What has been looked at.
    """
    seen = set() if seen is None else seen
    if id(function) in seen:
        return False
    seen.add(id(function))
    if getattr(function, "starts_engine", False) is True or _name(function) in _STARTERS:
        return True
    if isinstance(function, functools.partial):
        return reaches_engine(function.func, seen)
    if isinstance(function, type):
        return any(reaches_engine(part, seen) for part in vars(function).values())
    function = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    function = getattr(function, "__func__", function)
    function = getattr(function, "fget", function)
    function = inspect.unwrap(function) if callable(function) else function
    if not isinstance(function, types.FunctionType):
        return False
    return any(reaches_engine(each, seen) for each in _named(function))


def _named(function: types.FunctionType) -> Iterator[Any]:
    """What the code names: starters, and functions and classes of tests."""
    names = list(_names(function.__code__))
    for name in names:
        found = function.__globals__.get(name)
        of_tests = inspect.ismodule(found) and found.__name__.startswith("tests.")
        for each in [getattr(found, n, None) for n in names] if of_tests else [found]:
            if _name(each) in _STARTERS or _name(each).startswith("tests."):
                yield each


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _name(thing: Any) -> str:
    """Its module and its name; empty for what is neither a function nor a class."""
    if not isinstance(thing, type | types.FunctionType | functools.partial):
        return ""
    thing = thing.func if isinstance(thing, functools.partial) else thing
    return f"{thing.__module__}.{thing.__qualname__}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    known: dict[Any, bool] = {}
    for item in items:
        definitions = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
        used = [definitions[name] for name in item.fixturenames if name in definitions]
        functions = [d.func for each in used for d in each] + [getattr(item, "function", None)]
        for function in functions:
            if function not in known:
                known[function] = reaches_engine(function)
        if any(known[function] for function in functions):
            item.add_marker(pytest.mark.engine)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _current.append(item)
    yield
    _current.pop()
