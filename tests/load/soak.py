"""A server under a realistic load for minutes, and what is left of it afterwards.

Clients stream, leave, send bursts beyond the queue, choose settings, ask for what is refused; now
and then everybody is preempted. Each answer is compared with the one that the same server gave when
nobody else asked, in float32. The last line of the output is one JSON object. Run from the root of
the checkout:

    python -m tests.load.soak
"""

import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import psutil
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from tests.load.clients import MODEL_NAME, Clients
from tests.load.fuzz import fuzz
from tests.load.mixture import KINDS, MAX_MODEL_LEN, SERVER, Request, draw
from tests.load.script import long_text, model_folder, run_script
from vllm_kvselect.config import CONFIG_KEY
from vllm_kvselect.evaluation.server import Server, plugin_environment, serving
from vllm_kvselect.machine import machine
from vllm_kvselect.offline.tables import console as table_console
from vllm_kvselect.tiny_model import shallow_copy

WARM_UP = 0.5
"""Share of the requests before memory is measured.

Its peak is reached when the largest batches that ask for log-probabilities of their prompts have
met, with stock vLLM too.
"""
MAX_GROWTH = 0.02


def main(
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    num_layers: Annotated[int, typer.Option(min=1, help="Layers of the model to keep.")] = 4,
    minutes: Annotated[float, typer.Option(help="Longest time for all requests.")] = 10.0,
    num_requests: Annotated[int, typer.Option(min=10)] = 5000,
    num_distinct: Annotated[int, typer.Option(min=1, help="Different good ones.")] = 60,
    num_fuzzed: Annotated[
        int, typer.Option(min=10, help="More, drawn from the OpenAPI schema.")
    ] = 300,
    num_clients: int = 12,
    burst: Annotated[int, typer.Option(help="Requests sent at once, now and then.")] = 48,
    kv_mib: int = 5,
    seed: int = 0,
) -> None:
    """Loads a server; fails if an answer is wrong or lost, or something is leaked."""
    settings = dict(locals())
    from transformers import AutoTokenizer

    console = Console(stderr=True)
    source_model = model_folder(model)
    text, _ = long_text(AutoTokenizer.from_pretrained(source_model), 20_000)
    requests = draw(text, num_distinct, num_distinct, seed, KINDS, share_leaving=0.0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = shallow_copy(source_model, num_layers, Path(scratch, "model"))
        # The development mode lets us preempt everybody and ask the worker what it remembers.
        environment = plugin_environment() | {"VLLM_SERVER_DEV_MODE": "1"}
        with serving(console, "server", str(folder), _flags(kv_mib), environment) as server:
            clients = Clients(server.url, [], Random(seed))
            started = time.perf_counter()
            summary = asyncio.run(_soak(clients, server, requests, settings, console))
    summary["seconds"] = round(time.perf_counter() - started, 1)
    _print_table(clients, summary)
    settings["model"] = source_model.name
    print(json.dumps({**summary, "settings": settings, "machine": machine()}))
    if summary["problems"]:
        sys.exit(1)


def _flags(kv_mib: int) -> list[str]:
    """A small pool, small chunks, a short queue: everything that can happen happens soon."""
    flags = ["--served-model-name", MODEL_NAME, "--dtype", "float32", "--enforce-eager"]
    flags += ["--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-memory-bytes", f"{kv_mib}M"]
    flags += ["--max-num-batched-tokens", "150", "--max-num-seqs", "8"]
    flags += ["--max-num-queued-reqs", "32", "--disable-uvicorn-access-log"]
    return [*flags, "--additional-config", json.dumps({CONFIG_KEY: SERVER})]


async def _soak(
    clients: Clients,
    server: Server,
    requests: list[Request],
    settings: dict[str, Any],
    console: Console,
) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 60 * settings["minutes"]
    with console.status("asking everything once, alone"):
        for request in requests:
            clients.expected.append((request, await clients.choices(request)))
    before = await _idle(clients.http, server)
    num_requests, num_fuzzed = settings["num_requests"], settings["num_fuzzed"]
    load = (settings["num_clients"], settings["burst"])

    async def phase(share: float, name: str, seed: int) -> tuple[Counter[int], list[str]]:
        with console.status(name):
            fuzzing = asyncio.to_thread(fuzz, server.url, int(num_fuzzed * share), seed)
            loading = clients.run(int(num_requests * share), *load, deadline)
            found, _ = await asyncio.gather(fuzzing, loading)
            return found

    statuses, failures = await phase(WARM_UP, "warming up", settings["seed"])
    warm = await _idle(clients.http, server)
    more, more_failures = await phase(1 - WARM_UP, "under load", settings["seed"] + 1)
    after = await _idle(clients.http, server)
    await clients.http.aclose()
    return _summary(clients, statuses + more, failures + more_failures, (before, warm, after))


def _summary(
    clients: Clients,
    statuses: Counter[int],
    failures: list[str],
    states: tuple[dict[str, Any], dict[str, Any], dict[str, Any]],
) -> dict[str, Any]:
    """What came of the requests, and what differs from the states before them."""
    before, warm, after = states
    growth = sum(after["resident_mib"]) / sum(warm["resident_mib"]) - 1
    problems = [*clients.outcomes.wrong, *clients.outcomes.lost, *failures]
    problems += [f"{name}: {after[name]}" for name in LEAKS if after[name] != before[name]]
    if growth > MAX_GROWTH:
        problems.append(f"resident memory grew by {growth:.1%}")
    return {
        "requests": clients.outcomes.num_requests + statuses.total(),
        "outcomes": clients.outcomes.counts,
        "wrong": len(clients.outcomes.wrong),
        "lost": len(clients.outcomes.lost),
        "fuzzed_by_status": statuses,
        "fuzzed_failures": len(failures),
        "preemptions": after["preemptions"],
        "prompts_evicted": after["prompts_evicted"],
        "contexts_found": after["contexts_found"],
        "rounds": after["rounds"],
        "resident_mib": [state["resident_mib"] for state in states],
        "growth": round(growth, 4),
        "leaks": {name: after[name] for name in LEAKS},
        "problems": problems[:20],
    }


LEAKS = ("running", "waiting", "blocks_used", "blocks_saved", "requests_remembered")


async def _idle(http: httpx.AsyncClient, server: Server) -> dict[str, Any]:
    """State of the server once nobody asks, with an empty prefix cache."""
    for _ in range(240):
        metrics = await _metrics(http)
        if not metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]:
            break
        await asyncio.sleep(0.5)
    reset = (await http.post("/reset_prefix_cache")).json()
    call = await http.post("/collective_rpc", json={"method": "kv_eviction_stats"})
    (worker,) = call.json()["results"]
    return {
        "running": metrics["vllm:num_requests_running"],
        "waiting": metrics["vllm:num_requests_waiting"],
        # The cache can be emptied only when no block is held.
        "blocks_used": metrics["vllm:kv_cache_usage_perc"] + (not reset["success"]),
        "blocks_saved": metrics["vllm:kv_eviction_saved_blocks"],
        "requests_remembered": worker["num_requests"],
        "preemptions": metrics["vllm:num_preemptions_total"],
        "prompts_evicted": metrics["vllm:kv_eviction_requests_total"],
        "contexts_found": metrics["vllm:kv_eviction_state_hits_total"],
        "rounds": metrics["vllm:kv_eviction_rounds_total"],
        "resident_mib": _resident_mib(server.pid),
    }


async def _metrics(http: httpx.AsyncClient) -> dict[str, float]:
    text = (await http.get("/metrics")).text
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def _resident_mib(pid: int) -> list[float]:
    """Resident memory of a server and of each process that it started."""
    server = psutil.Process(pid)
    processes = (server, *server.children(recursive=True))
    return [round(process.memory_info().rss / 2**20, 1) for process in processes]


def _print_table(clients: Clients, summary: dict[str, Any]) -> None:
    table = Table(title="Soak")
    table.add_column("outcome")
    table.add_column("requests", justify="right")
    for name, number in sorted(clients.outcomes.counts.items()):
        table.add_row(name, str(number))
    for name in ("wrong", "lost"):
        table.add_row(name, str(summary[name]))
    for status, number in sorted(summary["fuzzed_by_status"].items()):
        table.add_row(f"drawn from the schema: status {status}", str(number))
    console = table_console()
    console.print(table)
    before, warm, after = summary["resident_mib"]
    console.print(
        f"{summary['preemptions']:.0f} preemptions, {summary['prompts_evicted']:.0f} prompts "
        f"evicted, {summary['contexts_found']:.0f} contexts found, {summary['rounds']:.0f} rounds; "
        f"resident MiB by process: "
        f"{before} before, {warm} after warm-up, {after} at the end"
    )
    for problem in summary["problems"]:
        console.print(problem, markup=False)


if __name__ == "__main__":
    run_script(main)
