"""What stands in each table or list, by its name."""

import argparse
import ast
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tests.tables.code import PACKAGE, ROOT, first_clause, parsed, parts, served
from tests.tables.messages import FIRST, LAST, OR, of_requests, start_up
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.frontend.options import add_cli_args
from vllm_kvselect.registry import METHODS
from vllm_kvselect.request import REQUEST_KEYS
from vllm_kvselect.scorers import SERVED

MOST_IN_A_LINE = 4  # reasons of one message
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def renewed(page: Path) -> str:
    """The text of a page with its tables made anew."""
    text = page.read_text(encoding="utf-8")
    return MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[4]}", text)


def listed(items: Iterable[tuple[str, str]]) -> str:
    """A list in Markdown of names and what they mean."""
    return "\n".join(f"- {name}: {meaning}" for name, meaning in items)


# Settings: options, YAML keys and keys of requests


def settings() -> str:
    """Every setting once: its key in YAML, its option, its key in requests, default, meaning."""
    given, requests = options(), {field: key for key, field in REQUEST_KEYS.items()}
    items = []
    for name, field, meaning in fields(EvictionConfig):
        option = f", `{given[name]}`" if name in given else ""
        key = f", in a request `{requests[name]}`" if name in requests else ""
        spelt = f"**`{name}`**{option}{key}{default(field)}"
        items.append((spelt, f"{meaning}{choices(field, meaning)}"))
    items += [(f"`{option}`", text) for dest, option, text in actions() if dest not in given]
    return listed(items)


def fields(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo, str]]:
    """Fields of a configuration with their meanings; those of a part stand in its place."""
    meanings: dict[str, str] = {}
    for each in reversed(model.__mro__):
        meanings |= attributes(each.__doc__ or "")
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation)
        else:
            yield name, field, meanings[name]


def attributes(docstring: str) -> dict[str, str]:
    """What a docstring of Google's style says of each attribute, and of whose part it is."""
    first, _, listed = docstring.partition("Attributes:\n")
    whose = first.splitlines()[0] + " " if first.startswith("Of ") else ""
    found = re.findall(r"^ {8}(\w+): ((?:.*\n?)(?:^ {12}.*\n?)*)", listed, re.MULTILINE)
    return {name: f"{whose}{' '.join(text.split())}" for name, text in found}


def default(field: FieldInfo) -> str:
    """A field's default as one writes it in YAML; without one, what a value is."""
    value = field.get_default(call_default_factory=True)
    if value is None or value == ():
        return f", {kind(field.annotation)}"
    return f", `{str(value).lower() if isinstance(value, bool) else value}`"


def kind(annotation: Any) -> str:
    """What the values of a field without a default are."""
    kinds = {int: "a number", str: "a text"}
    if get_origin(annotation) is tuple:
        return "a list"
    return next(filter(None, map(kind, get_args(annotation))), kinds.get(annotation, ""))


def choices(field: FieldInfo, meaning: str) -> str:
    """The words among which a field is chosen, where its meaning does not say them."""
    words = list(_words(field.annotation))
    told = all(quoted(word) in meaning for word in words)
    return "" if told else f" Of {', '.join(map(quoted, words))}."


def _words(annotation: Any) -> Iterator[str]:
    for part in get_args(annotation):
        if get_origin(annotation) is Literal:
            yield str(part)
        else:
            yield from _words(part)


def options() -> dict[str, str]:
    """Options of the server by the field that each one sets."""
    names = {name for name, _, _ in fields(EvictionConfig)}
    return {dest: option for dest, option, _ in actions() if dest in names}


@cache
def actions() -> tuple[tuple[str, str, str], ...]:
    """What the command line takes from us: the field, the option in all its forms, its help."""
    parser = argparse.ArgumentParser(add_help=False)
    add_cli_args(parser)
    return tuple(
        (
            action.dest.removeprefix("kv_eviction_"),
            "`, `".join(action.option_strings),
            shown(action.help),
        )
        for action in parser._actions
    )


def shown(text: str | None) -> str:
    """A help text as people see it, without what stands for the parser's own default."""
    return re.sub(r"%\(default\).*$", "", text or "").strip()


def quoted(name: str) -> str:
    """A name as code; nothing for nothing."""
    return f"`{name}`" if name else ""


# Methods


def methods() -> str:
    """Every method that is served, by what the registry says of it, in its groups."""

    def row(name: str) -> tuple[str, str]:
        return quoted(name), f"{METHODS[name].summary} ({METHODS[name].paper})"

    return "\n\n".join(
        f"**{group}**\n\n{listed(map(row, names))}" for group, names in SERVED.items()
    )


# Metrics


def metrics() -> str:
    """What a server with eviction adds to `/metrics`, as the front end makes it."""
    kinds, items = {"Counter": "_total", "Gauge": "", "Histogram": ""}, []
    for path in sorted((PACKAGE / "engine").rglob("*.py")):
        for call in ast.walk(parsed(path)):
            if not isinstance(call, ast.Call):
                continue
            words = [part.id for part in (call.func, *call.args[:1]) if isinstance(part, ast.Name)]
            kind = next((word for word in words if word in kinds), None)
            texts = [part.value for part in call.args if isinstance(part, ast.Constant)]
            if kind is None or len(texts) < 2:
                continue
            name = f"vllm:kv_eviction_{str(texts[0]).removeprefix('vllm:kv_eviction_')}"
            items.append((f"`{name}{kinds[kind]}`, {kind.lower()}", str(texts[1])))
    return listed(items)


# Modules


def modules() -> str:
    """A line for each room, and for each module of the engine and of the ground.

    Rooms stand in the order in which they may import one another, as pyproject.toml has it.
    """
    return "\n".join(f"    {line}" for part in parts(PACKAGE) for line in _lines(part, 0))


def _lines(part: Path, depth: int) -> list[str]:
    if part.is_file():
        return [_line(part.name, first_clause(part), depth)]
    lines = [_line(f"{part.name}/", first_clause(part / "__init__.py"), depth)]
    inner = parts(part)
    if PACKAGE / "engine" in (part, *part.parents):
        return lines + [line for each in inner for line in _lines(each, depth + 1)]
    if not any(part in path.parents for path in served()):
        return lines
    names = ", ".join(each.stem for each in inner if each.is_file())
    lines += [_line("", line, depth) for line in textwrap.wrap(names, 84)]
    return lines + [line for each in inner if each.is_dir() for line in _lines(each, depth + 1)]


def _line(name: str, text: str, depth: int) -> str:
    return f"{'  ' * depth + name:<28} {text}"


# Refusals


def refusals() -> str:
    """What is refused at start-up: the reason, a semicolon, what to do."""
    return "\n".join(_with_its_reasons(text) for text in start_up(served()))


def _with_its_reasons(text: str) -> str:
    """A message in a line; if it may give many reasons, each in a line below."""
    before, _, rest = text.partition(FIRST)
    together, _, after = rest.partition(LAST)
    reasons = together.split(OR)
    if len(reasons) <= MOST_IN_A_LINE:
        return f"- {before}{together}{after}"
    return "\n".join([f"- {before}*reason*{after}:", *(f"    - {each}" for each in reasons)])


def refused_requests() -> str:
    """What is refused of a single request: the reason in the metric, the message."""
    return listed((quoted(kind), text) for kind, text in of_requests(served()))


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings,
    "methods": methods,
    "metrics": metrics,
    "modules": modules,
    "refusals": refusals,
    "refused_requests": refused_requests,
}
