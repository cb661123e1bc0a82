"""Throughput of stock vLLM and of the plugin: same prompts, output lengths and KV cache bytes.

Both run alternately, several rounds, each time in a fresh process. A ratio above 1 means that the
plugin is faster. The last line of the output is one JSON object with every setting and version.
"""

import json
import statistics
from math import ceil
from pathlib import Path
from typing import Annotated, Any

import typer
from _engine import MIB, Job, default_model, run_child, run_script
from _texts import plain_prompts
from _throughput import measure
from rich.console import Console
from rich.table import Table

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.machine import dtype_name, fast_dtype, machine
from vllm_kvselect.offline.parsing import parse_number
from vllm_kvselect.offline.tables import console as table_console

Result = dict[str, Any]
Round = dict[str, Result]


def main(
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    num_prompts: Annotated[int, typer.Option(min=1)] = 24,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 1500,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 200,
    kv_mib: Annotated[int, typer.Option(min=1, help="KV cache of both engines, in MiB.")] = 96,
    stock_kv_mib: Annotated[int, typer.Option(min=0, help="Stock's; 0: the same.")] = 0,
    method: Annotated[str, typer.Option(help="The plugin's method.")] = "adakv-perturb",
    budget: Annotated[str, typer.Option(help="Entries per KV head, or a fraction.")] = "256",
    decode_budget: Annotated[int, typer.Option(min=0, help="Of the plugin; 0: no rounds.")] = 0,
    decode_interval: Annotated[int, typer.Option(min=1, help="Tokens between rounds.")] = 128,
    block_size: Annotated[int, typer.Option(min=0, help="Of both engines; 0: their own.")] = 0,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Also both with a cache of this type, such as fp8.")
    ] = "",
    num_draft_tokens: Annotated[
        int, typer.Option(min=0, help="Drafted at a time by the model itself; 0: no drafts.")
    ] = 0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    dtype: str = dtype_name(fast_dtype()),
    enforce_eager: Annotated[
        bool, typer.Option(help="Without torch.compile, which takes minutes in each process.")
    ] = True,
    unlimited: Annotated[
        bool, typer.Option("--unlimited", help="Also stock with a KV cache that holds everything.")
    ] = False,
) -> None:
    """Measures stock vLLM and the plugin in turn and prints how much faster the plugin is."""
    settings = dict(locals())
    from transformers import AutoTokenizer

    model = model or default_model()
    texts, source = plain_prompts(AutoTokenizer.from_pretrained(model), num_prompts + 1, prompt_len)
    *prompts, warm_up = texts
    stock: Job = {
        "model": model,
        "dtype": dtype,
        "enforce_eager": enforce_eager,
        "kv_bytes": (stock_kv_mib or kv_mib) * MIB,
        "max_model_len": prompt_len + output_len,
        "output_len": output_len,
        "block_size": block_size,
        "prompts": prompts,
        "warm_up": warm_up,
        "eviction": None,
    }
    decoding = {"decode_budget": decode_budget, "decode_interval": decode_interval}
    if num_draft_tokens:
        itself = {"method": "draft_model", "model": model}
        stock["speculative_config"] = {**itself, "num_speculative_tokens": num_draft_tokens}
    eviction = EvictionConfig.parse({"method": method, "budget": parse_number(budget), **decoding})
    plugin = {**stock, "kv_bytes": kv_mib * MIB, "eviction": eviction.model_dump()}
    jobs = {"stock": stock, "plugin": plugin}
    if kv_cache_dtype:
        of_type = {"kv_cache_dtype": kv_cache_dtype}
        jobs |= {f"{name}, {kv_cache_dtype}": {**job, **of_type} for name, job in jobs.items()}
    measured = _measure_rounds(jobs, rounds, unlimited)
    summary = _summary(measured)
    _print_table(measured, summary)
    settings |= {"model": Path(model).name, "text": source}
    print(json.dumps({**summary, "settings": settings, "machine": machine(), "rounds": measured}))


def _measure_rounds(jobs: dict[str, Job], rounds: int, unlimited: bool) -> list[Round]:
    """Runs every engine once a round, in alternating order so that a slow drift cancels out."""
    measured: list[Round] = []
    with Console(stderr=True).status("starting") as status:

        def run(name: str, job: Job) -> Result:
            status.update(f"round {len(measured) + 1} of {rounds}: {name}")
            return run_child(__file__, job)

        for index in range(rounds):
            names = list(jobs) if index % 2 == 0 else list(reversed(jobs))
            results = {name: run(name, jobs[name]) for name in names}
            if unlimited:
                job = {**jobs["stock"], "kv_bytes": _bytes_for_all(jobs["stock"], results["stock"])}
                results["unlimited"] = run("stock, unlimited", job)
            measured.append(results)
    return measured


def _bytes_for_all(job: Job, stock: Result) -> int:
    """KV cache bytes that hold all requests at once, in blocks of the size stock chose."""
    block_bytes = ceil(job["kv_bytes"] / stock["num_blocks"])
    blocks_per_request = ceil(job["max_model_len"] / stock["block_size"])
    return block_bytes * (len(job["prompts"]) * blocks_per_request + 2)


def _summary(measured: list[Round]) -> dict[str, Any]:
    """The ratios over the rounds; seconds compare because the token counts are equal."""
    ratios = {
        name: [each["stock"]["seconds"] / each[name]["seconds"] for each in measured]
        for name in measured[0]
    }
    upper = ratios.get("unlimited")
    shares = [
        each["plugin"]["selection_seconds_once"] / each["stock"]["prefill_seconds"]
        for each in measured
    ]
    return {
        "ratio": _spread(ratios["plugin"]),
        # Of a cache of another type.
        "ratios": {name: _spread(ratios[name]) for name in ratios if ", " in name},
        "ratio_unlimited": round(statistics.median(upper), 3) if upper else None,
        "selection_share_of_prefill": round(statistics.median(shares), 4),
    }


def _spread(ratios: list[float]) -> dict[str, float]:
    """The median, and what lies farthest from it."""
    found = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return {name: round(ratio, 3) for name, ratio in found.items()}


def _print_table(measured: list[Round], summary: dict[str, Any]) -> None:
    table = Table(title="Throughput: stock vLLM and the plugin")
    columns = ("round", "engine", "seconds", "tokens/s", "requests/step", "preemptions", "blocks")
    for column in (*columns, "blocks a request", "prefill alone", "selection", "accepted"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for number, results in enumerate(measured, start=1):
        for name, result in results.items():
            table.add_row(
                str(number),
                name,
                f"{result['seconds']:.1f}",
                f"{result['output_tokens'] / result['seconds']:.1f}",
                f"{result['output_tokens'] / result['steps']:.1f}",
                str(result["preemptions"]),
                f"{result['num_blocks']} x {result['block_size']}",
                f"{result['most_blocks_per_request']:.1f}",
                f"{result['prefill_seconds']:.2f} s",
                f"{result['selection_seconds_once']:.2f} s" if name.startswith("plugin") else "",
                f"{result['accepted']} of {result['drafted']}" if result["drafted"] else "",
            )
        table.add_section()
    console = table_console()
    console.print(table)
    for name, ratio in summary["ratios"].items():
        spread = f"{ratio['median']} ({ratio['min']} to {ratio['max']})"
        console.print(f"{name} / stock throughput: {spread}")
    ratio = summary["ratio"]
    line = f"plugin / stock throughput: {ratio['median']} ({ratio['min']} to {ratio['max']})"
    if summary["ratio_unlimited"]:
        line += f"; a KV cache that holds everything: {summary['ratio_unlimited']}"
    console.print(
        f"{line}; selection: {summary['selection_share_of_prefill']:.1%} of stock's prefill"
    )


if __name__ == "__main__":
    run_script(main, measure)
