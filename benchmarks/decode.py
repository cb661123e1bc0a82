"""A decode step with `r` retained entries per KV head against stock vLLM's with `r` tokens.

Both read as many entries, so whatever the plugin's step takes longer is its own: page tables, the
kernel's work plan for every layer, heads that no longer share a length. Prompts of the plugin are
four blocks longer than what is retained of them; it decodes from the packed pages then. The engines
run alternately, each in a fresh process. The last line of the output is one JSON object.
"""

import json
import statistics
import time
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from _engine import (
    MIB,
    BenchmarkError,
    Job,
    blocks_retained,
    default_model,
    describe,
    empty_prefix_cache,
    engine_arguments,
    machine,
    run_child,
    run_script,
    table_console,
)
from _texts import plain_prompts
from rich.console import Console
from rich.table import Table

from vllm_kvselect.config import EvictionConfig

if TYPE_CHECKING:
    from vllm import LLM

BLOCK_SIZE = 32
"""The plugin's own choice on CPU; what is retained is a whole number of these."""
DROPPED_BLOCKS = 4

Result = dict[str, Any]


def main(
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    batches: Annotated[str, typer.Option(help="Requests that decode at once.")] = "1,8,32",
    retained: Annotated[str, typer.Option(help="Entries per KV head.")] = "128,512,2048",
    method: Annotated[str, typer.Option(help="The plugin's method.")] = "adakv-perturb",
    steps: Annotated[int, typer.Option(min=2, help="Steps that are timed; the median.")] = 60,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    kv_mib: Annotated[int, typer.Option(min=1, help="KV cache of both engines, in MiB.")] = 3072,
    dtype: str = "bfloat16",
    enforce_eager: Annotated[
        bool, typer.Option(help="Without torch.compile, which takes minutes in each process.")
    ] = True,
) -> None:
    """Times decode steps of stock vLLM and of the plugin and prints their ratios."""
    settings = dict(locals())
    model = model or default_model()
    cases = list(product(_integers(batches), _integers(retained)))
    if any(entries % BLOCK_SIZE for _, entries in cases):
        raise BenchmarkError(f"--retained must be multiples of {BLOCK_SIZE}, not {retained}")
    longest = max(entries for _, entries in cases) + DROPPED_BLOCKS * BLOCK_SIZE
    # The first request decodes while those behind it are prefilled, in a few steps each.
    before = max(batch for batch, _ in cases) * (1 + longest // 1024)
    stock: Job = {
        "model": model,
        "dtype": dtype,
        "enforce_eager": enforce_eager,
        "kv_bytes": kv_mib * MIB,
        "max_model_len": longest + before + steps + 8,
        "steps": steps,
        "cases": cases,
        "eviction": None,
    }
    budget = max(entries for _, entries in cases)
    eviction = EvictionConfig.parse(
        {"method": method, "budget": budget, "allow_override": ["budget"]}
    )
    jobs = {"stock": stock, "plugin": {**stock, "eviction": eviction.model_dump()}}
    measured = _measure_rounds(jobs, rounds)
    rows = [_row(case, measured, index) for index, case in enumerate(cases)]
    _print_table(rows, measured[0]["plugin"]["num_layers"])
    settings |= {"model": Path(model).name}
    print(json.dumps({"cases": rows, "settings": settings, "machine": machine()}))


def _integers(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise BenchmarkError(f"{text!r} is no list of integers, such as 1,8,32") from None


def _measure_rounds(jobs: dict[str, Job], rounds: int) -> list[dict[str, Result]]:
    """Runs both engines once a round, in alternating order so that a slow drift cancels out."""
    measured = []
    with Console(stderr=True).status("starting") as status:
        for index in range(rounds):
            names = list(jobs) if index % 2 == 0 else list(reversed(jobs))
            results = {}
            for name in names:
                status.update(f"round {index + 1} of {rounds}: {name}")
                results[name] = run_child(__file__, jobs[name])
            measured.append(results)
    return measured


def _row(case: tuple[int, int], measured: list[dict[str, Result]], index: int) -> dict[str, Any]:
    stock, plugin = (
        [each[name]["milliseconds"][index] for each in measured] for name in ("stock", "plugin")
    )
    ratios = [ours / theirs for ours, theirs in zip(plugin, stock, strict=True)]
    return {
        "batch": case[0],
        "retained": case[1],
        "stock_ms": round(statistics.median(stock), 2),
        "plugin_ms": round(statistics.median(plugin), 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def _print_table(rows: list[dict[str, Any]], num_layers: int) -> None:
    table = Table(title="A decode step: stock vLLM and the plugin on as many entries")
    for column in ("batch", "entries", "stock ms", "plugin ms", "ratio", "more per layer"):
        table.add_column(column, justify="right")
    for row in rows:
        more = (row["plugin_ms"] - row["stock_ms"]) / num_layers * 1e3
        table.add_row(
            str(row["batch"]),
            str(row["retained"]),
            f"{row['stock_ms']:.2f}",
            f"{row['plugin_ms']:.2f}",
            f"{row['ratio']:.3f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})",
            f"{more:.0f} us",
        )
    table_console().print(table)


def measure(job: Job) -> Result:
    """The child's part: the median time of a decode step in every case, on one engine."""
    from transformers import AutoTokenizer
    from vllm import LLM

    llm = LLM(**engine_arguments(job))
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    milliseconds = []
    for batch, entries in job["cases"]:
        length = entries if job["eviction"] is None else entries + DROPPED_BLOCKS * BLOCK_SIZE
        prompts, _ = plain_prompts(tokenizer, batch, length)
        _check(job, length, entries)
        milliseconds.append(_decode(llm, prompts, entries, job))
        empty_prefix_cache(llm)
    config = llm.llm_engine.vllm_config
    num_layers = config.model_config.get_num_layers(config.parallel_config)
    return {"milliseconds": milliseconds, "num_layers": num_layers, **describe(llm)}


def _check(job: Job, length: int, entries: int) -> None:
    if job["eviction"] is None:
        return
    blocks = blocks_retained(length, BLOCK_SIZE, {**job["eviction"], "budget": entries})
    if blocks * BLOCK_SIZE != entries:
        raise RuntimeError(f"{blocks} blocks are retained of {length} tokens, not {entries} / 32")


def _decode(llm: "LLM", prompts: list[list[int]], entries: int, job: Job) -> float:
    """Prefills all prompts, then times steps in which every request decodes one token."""
    from vllm import SamplingParams

    engine, steps = llm.llm_engine, job["steps"]
    extra = {"kv_eviction_budget": entries} if job["eviction"] is not None else None
    params = SamplingParams(
        temperature=0.0,
        max_tokens=job["max_model_len"] - len(prompts[0]),
        ignore_eos=True,
        detokenize=False,
        extra_args=extra,
    )
    ids = [str(number) for number in range(len(prompts))]
    for name, prompt in zip(ids, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    decoding: set[str] = set()
    while len(decoding) < len(ids):
        decoding |= {output.request_id for output in engine.step() if output.outputs}
    times = [time.perf_counter()]
    while len(times) <= steps:
        if len(engine.step()) != len(ids):
            raise RuntimeError("a request was preempted or ended while steps were timed")
        times.append(time.perf_counter())
    engine.abort_request(ids)
    while engine.has_unfinished_requests():
        engine.step()
    seconds = [after - before for before, after in pairwise(times)]
    return statistics.median(seconds[1:]) * 1e3


if __name__ == "__main__":
    run_script(main, measure)
