"""Tables of what was measured, printed and as Markdown, with the command line that makes them."""

import platform
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_kvselect import __version__
from vllm_kvselect.tiny_model import NAME

DPI = 100
"""Of pictures beside a table."""


def show(header: Sequence[str], lines: Iterable[Sequence[str]], title: str | None = None) -> None:
    """Prints a table for people."""
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for column in header:
        table.add_column(escape(column))
    for line in lines:
        table.add_row(*map(escape, line))
    console().print(table)


def console() -> Console:
    """A console that is wide enough for tables also when stdout is a file."""
    found = Console()
    return found if found.is_terminal else Console(width=200)


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """A table as lines of Markdown."""
    cells = [header, ["---"] * len(header), *lines]
    return ["| " + " | ".join(line) + " |" for line in cells]


def command_line(
    words: Sequence[str],
    config: BaseModel,
    eviction: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> str:
    """The command line of a configuration; defaults are left out.

    Args:
        words: What it begins with.
        config: The configuration, whose fields are the options.
        eviction: Further fields of `EvictionConfig`, for `--set`.
        defaults: Of fields that have other ones than the configuration's class; None for those that
            are not options.
    """
    words = list(words)
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        default = defaults.get(name, field.default)
        if (default is None and name in defaults) or value == default:
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [f"--{name.replace('_', '-')}", text]
    for name, value in eviction.items():
        words += ["--set", f"{name}={value}"]
    return shlex.join(words)


def model_name(name: str) -> str:
    """A model's name without its folder."""
    return Path(name).name or NAME


def versions() -> dict[str, str]:
    """Versions of what computed the numbers."""
    found = {name: version(name) for name in ("torch", "transformers")}
    return {"vllm_kvselect": __version__, "python": platform.python_version()} | found
