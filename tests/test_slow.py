"""What `make fast` leaves out is there to be left out, and everything else is not slow."""

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests import slow
from tests.next.plugin import NOT_RUN


def functions_of(file: Path) -> set[str]:
    """What a file defines, and what it takes in of a module with all that this has."""
    found = set()
    for node in ast.parse(file.read_text()).body if file.exists() else ():
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            found |= functions_of(slow.ROOT / f"{str(node.module).replace('.', '/')}.py")
    return found


def missing(names: Iterable[str]) -> list[str]:
    """Those that name no test function, or no module."""
    parts = {name: name.partition("::") for name in names}
    return [
        name
        for name, (path, _, function) in parts.items()
        if not (slow.ROOT / path).exists()
        or (function and function not in functions_of(slow.ROOT / path))
    ]


def test_every_function_in_the_file_exists() -> None:
    """Moved or renamed ones are to be moved in the file too, or the file measured anew."""
    assert not missing(slow.named())


def test_what_the_next_release_does_not_run_exists() -> None:
    assert not missing(NOT_RUN)


def test_what_the_file_names_is_marked(request: pytest.FixtureRequest) -> None:
    named = set(slow.named())
    for item in request.session.items:
        is_named = slow.function_of(item.nodeid) in named
        assert is_named == (item.get_closest_marker("slow") is not None)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([0.1, 0.2], False), ([0.1, 0.9], True), ([0.1] * 8, True), ([0.1] * 6, False)],
)
def test_one_long_case_or_many_short_ones_are_slow(seconds: list[float], expected: bool) -> None:
    assert slow.is_slow(seconds) == expected


def test_cases_belong_to_their_function() -> None:
    for case in ("", "[a::b@c]", "@group", "[a]@group"):
        assert slow.function_of(f"tests/test_it.py::test_it{case}") == "tests/test_it.py::test_it"
