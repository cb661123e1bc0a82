"""What an analysis leaves behind: a JSON record, a Markdown table, and PNG figures."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from papers.settings import DEFAULTS, AnalysisConfig
from vllm_kvselect.offline import tables
from vllm_kvselect.offline.texts import describe

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Findings:
    """What an analysis found.

    Attributes:
        columns: Names of the table's columns.
        rows: The table, as text.
        notes: Sentences below the table.
        results: All numbers, for the record.
        figures: Pictures by name.
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    results: dict[str, Any]
    figures: dict[str, "Figure"]
    notes: Sequence[str] = ()


def write(
    findings: Findings, config: AnalysisConfig, model: "PreTrainedModel", seconds: float
) -> list[Path]:
    """Writes everything into the configured folder.

    Args:
        findings: What was found.
        config: What was asked.
        model: The model that was analysed.
        seconds: How long it took.

    Returns:
        The files written.
    """
    config.out.mkdir(parents=True, exist_ok=True)
    record = {
        "analysis": config.analysis,
        "command": command(config),
        "config": config.model_dump(mode="json"),
        "evictions": [each.model_dump(mode="json") for each in config.evictions()],
        "model": _describe_model(model, config),
        "text": describe(config.texts),
        "versions": tables.versions(),
        "seconds": round(seconds, 1),
        "results": findings.results,
    }
    paths = [config.out / f"{config.analysis}.json", config.out / f"{config.analysis}.md"]
    paths[0].write_text(json.dumps(record) + "\n", encoding="utf-8")
    paths[1].write_text(_markdown(findings, record), encoding="utf-8")
    for name, figure in findings.figures.items():
        paths.append(config.out / f"{config.analysis}-{name}.png")
        figure.savefig(paths[-1], dpi=tables.DPI)
    return paths


def show(findings: Findings) -> None:
    """Prints the table and what stands below it."""
    tables.show(findings.columns, findings.rows)
    for note in findings.notes:
        tables.console().print(note, markup=False)


def command(config: AnalysisConfig) -> str:
    """The command line that makes this analysis; defaults are left out."""
    words = ("python", "benchmarks/analyze.py", config.analysis)
    defaults = dict.fromkeys(("analysis", "eviction")) | DEFAULTS[config.analysis]._asdict()
    return tables.command_line(words, config, config.eviction, defaults)


def _describe_model(model: "PreTrainedModel", config: AnalysisConfig) -> dict[str, Any]:
    shape = model.config.get_text_config()
    return {
        "name": tables.model_name(config.model),
        "class": type(model).__name__,
        "num_layers": shape.num_hidden_layers,
        "num_heads": shape.num_attention_heads,
        "num_kv_heads": getattr(shape, "num_key_value_heads", shape.num_attention_heads),
    }


def _markdown(findings: Findings, record: dict[str, Any]) -> str:
    config, known = record["config"], record["model"]
    lines = [
        f"    {record['command']}",
        "",
        f"{known['name']}, {config['dtype']}; {config['num_texts']} texts ({record['text']}), "
        f"{config['length']} tokens, task {config['task']}; block size {config['block_size']}; "
        f"{record['seconds']:.0f} s.",
        "",
        *tables.markdown(findings.columns, findings.rows),
        *(line for note in findings.notes for line in ("", note)),
    ]
    return "\n".join(lines) + "\n"
