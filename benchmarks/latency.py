"""Time to first token and time per output token over HTTP, at fixed request rates.

`vllm bench serve` sends the same random prompts at the same times to stock vLLM and to the plugin,
each a real server with the same KV cache bytes, in alternating order. Below the rate that stock
sustains the two should not differ; above it stock queues. The last line is one JSON object.
"""

import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from _engine import MIB, BenchmarkError, default_model, run_script, stock_environment
from rich.console import Console
from rich.table import Table

from vllm_kvselect.evaluation.server import plugin_environment, serving, tail, vllm_command
from vllm_kvselect.machine import dtype_name, fast_dtype, machine
from vllm_kvselect.offline.tables import console as table_console

METRICS = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "output_throughput")

Result = dict[str, float]


def main(
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    rates: Annotated[str, typer.Option(help="Requests per second.")] = "0.1,0.2,0.4",
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests at each rate.")] = 16,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 1500,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 200,
    kv_mib: Annotated[int, typer.Option(min=1, help="KV cache of both servers, in MiB.")] = 96,
    method: Annotated[str, typer.Option(help="As for --kv-eviction.")] = "adakv-perturb",
    budget: Annotated[str, typer.Option(help="As for --kv-eviction-budget.")] = "256",
    rounds: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Measures the latency of stock vLLM and of the plugin at every rate."""
    settings = dict(locals())
    model = model or default_model()
    flags = ["--dtype", dtype_name(fast_dtype())]
    flags += ["--max-model-len", str(prompt_len + output_len + 16), "--enforce-eager"]
    flags += ["--kv-cache-memory-bytes", str(kv_mib * MIB)]
    eviction = ["--kv-eviction", method, "--kv-eviction-budget", budget]
    servers = {
        "stock": (flags, stock_environment()),
        "plugin": (flags + eviction, plugin_environment()),
    }
    client = ["--num-prompts", str(num_prompts), "--ignore-eos", "--temperature", "0"]
    client += ["--random-input-len", str(prompt_len), "--random-output-len", str(output_len)]
    console = Console(stderr=True)
    measured: dict[str, dict[str, list[Result]]] = {name: {} for name in servers}
    for index in range(rounds):
        names = list(servers) if index % 2 == 0 else list(reversed(servers))
        for name in names:
            with serving(console, name, model, *servers[name]) as server:
                for rate in rates.split(","):
                    with console.status(f"round {index + 1} of {rounds}: {name}, {rate}/s"):
                        result = _bench(server.url, model, [*client, "--request-rate", rate])
                    if result["completed"] != num_prompts:
                        raise BenchmarkError(f"{name}: only {result['completed']} were answered")
                    measured[name].setdefault(rate, []).append(result)
    rows = _rows(measured)
    _print_table(rows)
    settings |= {"model": Path(model).name}
    print(json.dumps({"rates": rows, "settings": settings, "machine": machine()}))


def _bench(url: str, model: str, arguments: list[str]) -> Result:
    """Runs vLLM's own client once, after one request that warms the server up."""
    with tempfile.TemporaryDirectory() as folder:
        command = [vllm_command(), "bench", "serve", "--backend", "openai", "--base-url", url]
        command += ["--model", model, "--dataset-name", "random"]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        command += ["--num-warmups", "1", "--disable-tqdm", *arguments]
        client = subprocess.run(
            command,
            env=stock_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if client.returncode != 0:
            raise BenchmarkError(f"vllm bench serve failed; its log ends:\n{tail(client.stdout)}")
        result = json.loads((Path(folder) / "result.json").read_text())
    return {key: result[key] for key in (*METRICS, "completed")}


def _rows(measured: dict[str, dict[str, list[Result]]]) -> list[dict[str, Any]]:
    return [
        {"rate": float(rate), "server": name}
        | {key: round(statistics.median(each[key] for each in results), 1) for key in METRICS}
        for rate in measured["stock"]
        for name, results in ((name, measured[name][rate]) for name in measured)
    ]


def _print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Latency over HTTP: stock vLLM and the plugin")
    columns = ("requests/s", "server", "TTFT", "TTFT p99", "per token", "per token p99", "tokens/s")
    for column in columns:
        table.add_column(column, justify="left" if column == "server" else "right")
    for row in rows:
        *times, tokens = (row[key] for key in METRICS)
        cells = [f"{time:.0f} ms" for time in times]
        table.add_row(f"{row['rate']:g}", row["server"], *cells, f"{tokens:.1f}")
        if row["server"] == "plugin":
            table.add_section()
    table_console().print(table)


if __name__ == "__main__":
    run_script(main)
