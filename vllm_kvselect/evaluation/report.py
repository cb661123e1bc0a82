"""What an evaluation leaves behind: all numbers as JSON, tables as Markdown, pictures."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from vllm_kvselect.evaluation.pictures import pictures
from vllm_kvselect.evaluation.scores import SOLVED, Mean, Row, rows
from vllm_kvselect.evaluation.settings import FULL, EvaluationConfig
from vllm_kvselect.machine import processor
from vllm_kvselect.offline import tables
from vllm_kvselect.offline.intervals import LEVEL
from vllm_kvselect.registry import METHODS


def write(frame: pd.DataFrame, config: EvaluationConfig, seconds: float) -> list[Path]:
    """Writes scores, tables and pictures into the configured folder, and names the files."""
    found = rows(frame)
    record = {
        "command": command(config),
        "config": config.model_dump(mode="json"),
        "evictions": [each.model_dump(mode="json") for each in config.evictions()],
        "model": tables.model_name(config.model),
        "machine": {"processor": processor(), "threads": torch.get_num_threads()},
        "versions": tables.versions(),
        "seconds": round(seconds, 1),
        "rows": [asdict(each) for each in found],
    }
    paths = [config.out / "scores.json", config.out / "table.md"]
    paths[0].write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(found, record), encoding="utf-8")
    for name, figure in pictures(frame).items():
        paths.append(config.out / f"{name}.png")
        figure.savefig(paths[-1], dpi=tables.DPI)
    return paths


def show(frame: pd.DataFrame) -> None:
    """Prints the tables for people."""
    for title, header, cells in _tables(rows(frame)):
        tables.show(header, cells, title)
    tables.console().print(_EXPLAINED, markup=False)


def command(config: EvaluationConfig) -> str:
    """The command line that makes this evaluation; defaults are left out."""
    if config.methods == tuple(METHODS):
        config = config.model_copy(update={"methods": ("all",)})
    words = ("vllm-kvselect", "evaluate", config.suite)
    defaults = dict.fromkeys(("suite", "eviction"))
    return tables.command_line(words, config, config.eviction, defaults)


def markdown(found: Iterable[Row], record: dict[str, Any]) -> str:
    """The tables as a page, with the command that makes it; what follows is written elsewhere."""
    versions, machine = record["versions"], record["machine"]
    lines = [
        f"    {record['command']}",
        "",
        f"{record['model']}; torch {versions['torch']}, transformers {versions['transformers']}; "
        f"{machine['processor']}, {machine['threads']} threads.",
    ]
    for title, header, cells in _tables(found):
        lines += ["", f"**{title}**", ""]
        lines += tables.markdown(header, cells)
    return "\n".join([*lines, "", _EXPLAINED, ""])


_EXPLAINED = (
    f"Scores in per cent. *mean*: over the tasks that the full cache solves to more than "
    f"{SOLVED:.0%}; the others are in brackets. *minus ...*: on the same prompts, with the "
    f"{LEVEL:.0%} bootstrap interval. *kept*: entries retained of the compressed prompt. *NLL*: "
    "negative log-likelihood of the right answers of the tasks in the mean, in nats per token "
    "without the first; *likeliest*: share of those tokens that are the likeliest."
)


_Table = tuple[str, list[str], list[list[str]]]


def _tables(found: Iterable[Row]) -> list[_Table]:
    """Title, columns and lines of the tables: overviews, then each scenario and length."""
    ordered = sorted(found, key=lambda row: (row.scenario != "regular", row.length))
    groups = [
        (f"{scenario}, {length} tokens", list(group))
        for (scenario, length), group in groupby(
            ordered, key=lambda row: (row.scenario, row.length)
        )
    ]
    several = [each for each in groups if len({row.budget for row in each[1]}) > 2]
    return [*(_overview(*each) for each in several), *(_table(*each) for each in groups)]


def _overview(title: str, group: list[Row]) -> _Table:
    """A line a method, a column a budget: the mean score and, behind it, the NLL."""
    budgets = list(dict.fromkeys(str(row.budget) for row in group if row.budget is not None))
    lines = [
        [method, *(_summary(found.get(budget, found.get("None"))) for budget in budgets)]
        for method in dict.fromkeys(map(_method, group))
        if (found := {str(row.budget): row for row in group if _method(row) == method})
    ]
    return f"{title}: mean score, NLL", ["method", *budgets], lines


def _summary(row: Row | None) -> str:
    if row is None or row.score is None:
        return ""
    return f"{100 * row.score.value:.0f}" + (f", {row.nll.value:.2f}" if row.nll else "")


def _table(title: str, group: list[Row]) -> _Table:
    tasks = list(dict.fromkeys(task for row in group for task in row.scores))
    numbers = {task: max(row.num_examples.get(task, 0) for row in group) for task in tasks}
    by_nll = any(row.nll for row in group)
    by_tokens = any(row.tokens for row in group)
    by_agreement = any(row.accuracy for row in group)
    solved = {task for row in group for task in row.solved}
    total = sum(numbers[task] for task in solved)
    header = ["method", "budget", "kept", *(f"{task} (n = {numbers[task]})" for task in tasks)]
    minus = "minus full" if group[0].against == FULL else f"minus {group[0].against}"
    header += [f"mean (n = {total})", minus]
    header += ["NLL", minus] * by_nll + ["likeliest"] * by_agreement
    header += ["tokens", minus] * by_tokens
    lines = []
    for row in group:
        cells = [_method(row), "" if row.budget is None else str(row.budget)]
        cells.append(f"{row.retained:.1%}")
        for task in tasks:
            score = f"{100 * row.scores[task]:.0f}" if task in row.scores else ""
            cells.append(score if task in solved or not score else f"({score})")
        mean = f"{100 * row.score.value:.1f}" if row.score else ""
        cells += [mean, _difference(row.score, 100, 1)]
        cells += [f"{row.nll.value:.3f}" if row.nll else "", _difference(row.nll)] * by_nll
        cells += [f"{row.accuracy.value:.0%}" if row.accuracy else ""] * by_agreement
        tokens = f"{row.tokens.value:.0f}" if row.tokens else ""
        cells += [tokens, _difference(row.tokens, digits=0)] * by_tokens
        lines.append(cells)
    return title, header, lines


def _method(row: Row) -> str:
    name = "full cache" if row.method == FULL else row.method
    return name if row.through in ("model", "engine") else f"{name} ({row.through})"


def _difference(mean: Mean | None, factor: int = 1, digits: int = 3) -> str:
    if mean is None or mean.difference is None:
        return ""
    values = (mean.difference, *(mean.interval or ()))
    text, *ends = (f"{factor * value:+.{digits}f}" for value in values)
    return f"{text} [{', '.join(ends)}]" if ends else text
