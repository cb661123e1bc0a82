"""Speeds of OpenVINO beside those of vLLM: every engine in turn, and the table."""

import statistics
from pathlib import Path
from typing import Any

from _engine import Job, run_child
from peers.openvino import WORKER
from peers.worker import Worker
from rich.console import Console
from rich.table import Table

from vllm_kvselect.offline.tables import console as table_console

Result = dict[str, Any]


def measure_in_turn(
    script: str, environment: Path, jobs: dict[str, Job], rounds: int
) -> list[dict[str, Result]]:
    """Runs every engine once a round, in alternating order so that a slow drift cancels out.

    Args:
        script: File of the calling script, whose children run vLLM.
        environment: Folder of OpenVINO's environment.
        jobs: By engine.
        rounds: Number of rounds.

    Returns:
        Of each round, what every engine's process said.
    """
    measured: list[dict[str, Result]] = []
    with Console(stderr=True).status("starting") as status:
        for index in range(rounds):
            results: dict[str, Result] = {}
            for name in list(jobs) if index % 2 == 0 else list(reversed(jobs)):
                status.update(f"round {index + 1} of {rounds}: {name}")
                if name.startswith("openvino"):
                    with Worker(environment, WORKER) as worker:
                        (results[name],) = worker.ask(jobs[name])
                else:
                    results[name] = run_child(script, jobs[name])
            measured.append(results)
    return measured


def print_table(measured: list[dict[str, Result]]) -> None:
    """Prints each engine's medians, and its throughput over stock's where that was measured."""
    table = Table(title="Stock vLLM, the plugin and OpenVINO GenAI")
    columns = ("engine", "seconds", "tokens/s", "of stock", "requests/step", "prefill alone")
    for column in (*columns, "first token"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name in measured[0]:
        results = [each[name] for each in measured]
        ratios = [
            each["stock"]["seconds"] / each[name]["seconds"] for each in measured if "stock" in each
        ]

        def median(key: str, results: list[Result] = results) -> float:
            return statistics.median(result[key] for result in results)

        tokens = median("output_tokens")
        table.add_row(
            name,
            f"{median('seconds'):.1f}",
            f"{tokens / median('seconds'):.1f}",
            f"{statistics.median(ratios):.2f}" if ratios else "",
            f"{tokens / median('steps'):.1f}",
            f"{median('prefill_seconds'):.1f} s",
            f"{median('first_token_seconds'):.2f} s",
        )
    table_console().print(table)
