"""What lm-evaluation-harness's scores leave behind, beside its own files: a record and a table."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from vllm_kvselect.evaluation.harness import HarnessScore
from vllm_kvselect.evaluation.report import command
from vllm_kvselect.evaluation.settings import FULL, EvaluationConfig
from vllm_kvselect.offline.tables import markdown, model_name


def write(scores: Iterable[HarnessScore], config: EvaluationConfig) -> list[Path]:
    """Writes all numbers and a table into the configured folder.

    Args:
        scores: The scores of all settings.
        config: What was asked.

    Returns:
        The files written.
    """
    scores = list(scores)
    record = {
        "command": command(config),
        "config": config.model_dump(mode="json"),
        "model": model_name(config.model),
        "scores": [asdict(score) for score in scores],
    }
    paths = [config.out / "harness.json", config.out / "harness.md"]
    paths[0].write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(f"    {command(config)}\n\n{table(scores)}", encoding="utf-8")
    return paths


def table(scores: Iterable[HarnessScore]) -> str:
    """A line a setting, a column a task and metric, in Markdown."""
    scores = list(scores)
    columns = list(dict.fromkeys((each.task, each.metric, each.num_prompts) for each in scores))
    header = [f"{task}, {metric} (n = {number})" for task, metric, number in columns]
    lines = []
    for setting in dict.fromkeys(each.setting for each in scores):
        own = {
            (each.task, each.metric, each.num_prompts): each
            for each in scores
            if each.setting == setting
        }
        kept = sum(each.retained for each in own.values()) / len(own)
        name = "full cache" if setting.method == FULL else setting.method
        budget = "" if setting.budget is None else str(setting.budget)
        values = [f"{own[key].value:.3f}" if key in own else "" for key in columns]
        lines.append([name, budget, f"{kept:.1%}", *values])
    return "\n".join([*markdown(["method", "budget", "kept", *header], lines), ""])


def show(scores: Iterable[HarnessScore]) -> None:
    """Prints the table for people."""
    Console().print(Markdown(table(scores)))
