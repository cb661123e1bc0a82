"""What stands in each table or list, by its name."""

import argparse
import re
import textwrap
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from tests.tables.code import PACKAGE, ROOT, first_clause, parts, served
from vllm_kvselect.config import SETTINGS, keys, words
from vllm_kvselect.engine.frontend.options import add_cli_args
from vllm_kvselect.metrics import METRICS
from vllm_kvselect.registry import METHODS, PARAMETERS
from vllm_kvselect.scorers import SERVED
from vllm_kvselect.settings import request_key

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
    file = [(f"`{option}`", text) for dest, option, text in actions() if dest not in SETTINGS]
    options = {dest: option for dest, option, _ in actions()}

    of_methods = {name for group in PARAMETERS for name in group.model_fields}

    def rows(operator: bool, of_method: bool = False) -> Iterable[tuple[str, str]]:
        for name, setting in SETTINGS.items():
            is_wanted = operator or (name in of_methods) is of_method
            if setting.operator is operator and is_wanted:
                option = f", `{options[name]}`" if name in options else ""
                key = f", in a request `{request_key(name)}`" if setting.in_requests else ""
                yield (
                    f"**`{name}`**{option}{key}, {default(name)}",
                    f"{setting.help}{choices(name)}",
                )

    groups = {
        "For operators": [*rows(True), *file],
        "For experts": rows(False),
        "Of methods": rows(False, of_method=True),
    }
    return "\n\n".join(f"**{group}**\n\n{listed(each)}" for group, each in groups.items())


def default(name: str) -> str:
    """A setting's default as one writes it in YAML, or in words."""
    value = keys()[name].default
    return SETTINGS[name].otherwise or quoted(str(value))


def choices(name: str) -> str:
    """The words among which a setting is chosen, where its help does not say them."""
    told = all(f"'{word}'" in SETTINGS[name].help for word in words(name))
    return "" if told else f" Of {', '.join(map(quoted, words(name)))}."


@cache
def actions() -> tuple[tuple[str, str, str], ...]:
    """What the command line takes from us: the field, the option in all its forms, its help."""
    parser = argparse.ArgumentParser(add_help=False)
    add_cli_args(parser)
    return tuple(
        (
            action.dest.removeprefix("kv_eviction_"),
            "`, `".join(action.option_strings),
            (action.help or "").partition("%(default)")[0].strip(),
        )
        for action in parser._actions
    )


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
    """What a server with eviction adds to `/metrics`."""
    return listed(
        (f"`{metric.sample(name).removesuffix('_sum')}`, {metric.kind}", metric.help)
        for name, metric in METRICS.items()
    )


# Modules


def modules() -> str:
    """A line for each room, with its modules by name, and for each module of the ground.

    Rooms stand in the order in which they may import one another, as pyproject.toml has it.
    """
    return "\n".join(f"    {line}" for part in parts(PACKAGE) for line in _lines(part, 0))


def _lines(part: Path, depth: int) -> list[str]:
    if part.is_file():
        return [_line(part.name, first_clause(part), depth)]
    lines = [_line(f"{part.name}/", first_clause(part / "__init__.py"), depth)]
    inner = parts(part)
    if not any(part in path.parents for path in served()):
        return lines
    names = ", ".join(each.stem for each in inner if each.is_file())
    lines += [_line("", line, depth) for line in textwrap.wrap(names, 84)]
    return lines + [line for each in inner if each.is_dir() for line in _lines(each, depth + 1)]


def _line(name: str, text: str, depth: int) -> str:
    return f"{'  ' * depth + name:<28} {text}"


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings,
    "methods": methods,
    "metrics": metrics,
    "modules": modules,
}
