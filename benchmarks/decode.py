"""A decode step with `r` retained entries per KV head against stock vLLM's with `r` tokens.

Both read as many entries, so whatever the plugin's step takes longer is its own: page tables, the
kernel's work plan for every layer, heads that no longer share a length. Prompts of the plugin are
four blocks longer than what is retained of them; it decodes from the packed pages then. With
`--dropped-blocks 0` nothing is dropped and both take vLLM's path. The engines take turns of a few
steps, in fresh processes every round. The last line of the output is one JSON object.
"""

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from _engine import (
    MIB,
    BenchmarkError,
    Job,
    blocks_retained,
    default_model,
    empty_prefix_cache,
    engine_arguments,
    run_script,
)
from _texts import plain_prompts
from _turns import TurnTaker, answer_in_turns
from rich.console import Console
from rich.table import Table

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.machine import dtype_name, fast_dtype, machine
from vllm_kvselect.offline.tables import console as table_console

if TYPE_CHECKING:
    from vllm import LLM

PAGE_SIZE = 32
"""Of the plugin on CPU, whatever its blocks; what is retained is a whole number of these."""

ENGINES = ("stock", "plugin")

Case = tuple[int, int]
"""How many requests decode, and the entries that each has per KV head."""

Times = dict[str, list[float]]
"""A median of every turn, in ms, by engine."""


def main(
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    batches: Annotated[str, typer.Option(help="Requests that decode at once.")] = "1,8,32",
    retained: Annotated[str, typer.Option(help="Entries per KV head.")] = "128,512,2048",
    method: Annotated[str, typer.Option(help="The plugin's method.")] = "adakv-perturb",
    steps: Annotated[int, typer.Option(min=2, help="Timed steps of a turn; the median.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each engine; the median.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of fresh processes.")] = 3,
    dropped_blocks: Annotated[
        int, typer.Option(min=0, help="By how much the plugin's prompts are longer.")
    ] = 4,
    stock_block_size: Annotated[
        int, typer.Option(min=0, help="Tokens per block of stock; 0 leaves it to vLLM.")
    ] = 0,
    block_size: Annotated[int, typer.Option(min=0, help="Of the plugin; 0: its own.")] = 0,
    kv_mib: Annotated[int, typer.Option(min=1, help="KV cache of both engines, in MiB.")] = 3072,
    dtype: str = dtype_name(fast_dtype()),
    enforce_eager: Annotated[
        bool, typer.Option(help="Without torch.compile, which takes minutes in each process.")
    ] = True,
) -> None:
    """Times decode steps of stock vLLM and of the plugin and prints their ratios."""
    settings = dict(locals())
    model = model or default_model()
    cases = list(product(_integers(batches), _integers(retained)))
    if any(entries % PAGE_SIZE for _, entries in cases):
        raise BenchmarkError(f"--retained must be multiples of {PAGE_SIZE}, not {retained}")
    longest = max(entries for _, entries in cases) + dropped_blocks * PAGE_SIZE
    # The first request decodes while those behind it are prefilled, in a few steps each.
    before = max(batch for batch, _ in cases) * (1 + longest // 1024)
    stock: Job = {
        "model": model,
        "dtype": dtype,
        "enforce_eager": enforce_eager,
        "kv_bytes": kv_mib * MIB,
        "max_model_len": longest + before + turns * (steps + 1) + 8,
        "steps": steps,
        "turns": turns,
        "cases": cases,
        "longer_by": 0,
        "block_size": stock_block_size,
        "eviction": None,
    }
    budget = max(entries for _, entries in cases)
    eviction = EvictionConfig.parse(
        {"method": method, "budget": budget, "allow_override": ["budget"]}
    )
    plugin = {
        **stock,
        "longer_by": dropped_blocks * PAGE_SIZE,
        "block_size": block_size,
        "eviction": eviction.model_dump(),
    }
    measured, num_layers = _measure_rounds({"stock": stock, "plugin": plugin}, rounds)
    rows = [_row(case, [each[index] for each in measured]) for index, case in enumerate(cases)]
    _print_table(rows, num_layers)
    settings |= {"model": Path(model).name}
    print(json.dumps({"cases": rows, "settings": settings, "machine": machine()}))


def _integers(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise BenchmarkError(f"{text!r} is no list of integers, such as 1,8,32") from None


def _measure_rounds(jobs: dict[str, Job], rounds: int) -> tuple[list[list[Times]], int]:
    """Measures every case in every round; also returns the number of layers."""
    measured = []
    cases, turns = jobs["stock"]["cases"], jobs["stock"]["turns"]
    with Console(stderr=True).status("starting") as status:
        for index in range(rounds):
            with ExitStack() as stack:
                status.update(f"round {index + 1} of {rounds}: starting")
                # One after the other: vLLM looks at the memory that is free.
                engines, num_layers = {}, 0
                for name in ENGINES:
                    engines[name] = stack.enter_context(TurnTaker(__file__, jobs[name]))
                    num_layers = engines[name].turn()
                results = []
                for batch, entries in cases:
                    status.update(f"round {index + 1} of {rounds}: {batch} x {entries}")
                    results.append(_measure_case(engines, turns))
                measured.append(results)
    return measured, num_layers


def _measure_case(engines: dict[str, TurnTaker], turns: int) -> Times:
    """Lets both engines prefill and then step in turns; who is first changes with every turn."""
    for engine in engines.values():
        engine.turn()
    times: Times = {name: [] for name in engines}
    for turn in range(turns):
        for name in ENGINES if turn % 2 == 0 else reversed(ENGINES):
            times[name].append(engines[name].turn())
    for engine in engines.values():
        engine.turn()
    return times


def _row(case: Case, measured: list[Times]) -> dict[str, Any]:
    ratios = [
        statistics.median(
            ours / theirs for ours, theirs in zip(times["plugin"], times["stock"], strict=True)
        )
        for times in measured
    ]
    stock, plugin = (
        statistics.median(milliseconds for times in measured for milliseconds in times[name])
        for name in ENGINES
    )
    return {
        "batch": case[0],
        "retained": case[1],
        "stock_ms": round(stock, 2),
        "plugin_ms": round(plugin, 2),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def _print_table(rows: list[dict[str, Any]], num_layers: int) -> None:
    table = Table(title="A decode step: stock vLLM and the plugin on as many entries")
    for column in ("batch", "entries", "stock ms", "plugin ms", "ratio", "more per layer"):
        table.add_column(column, justify="right")
    for row in rows:
        more = (row["ratio"] - 1) * row["stock_ms"] / num_layers * 1e3
        table.add_row(
            str(row["batch"]),
            str(row["retained"]),
            f"{row['stock_ms']:.2f}",
            f"{row['plugin_ms']:.2f}",
            f"{row['ratio']:.3f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})",
            f"{more:.0f} us",
        )
    table_console().print(table)


def measure(job: Job) -> Iterator[Any]:
    """The child's part: says how many layers there are, then goes through the cases.

    In every case the first answer comes after the prefill, then one per turn with the median time
    of its steps in ms, and one after the cache is emptied.
    """
    from transformers import AutoTokenizer
    from vllm import LLM

    llm = LLM(**engine_arguments(job))
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    config = llm.llm_engine.vllm_config
    yield config.model_config.get_num_layers(config.parallel_config)
    for batch, entries in job["cases"]:
        length = entries + job["longer_by"]
        prompts, _ = plain_prompts(tokenizer, batch, length)
        if job["eviction"] is not None:
            _check(job["eviction"], length, entries)
        ids = _prefill(llm, prompts, entries, job)
        yield None
        for _ in range(job["turns"]):
            yield _median_step(llm, len(ids), job["steps"])
        llm.llm_engine.abort_request(ids)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        empty_prefix_cache(llm)
        yield None


def _check(eviction: dict[str, Any], length: int, entries: int) -> None:
    blocks = blocks_retained(length, PAGE_SIZE, {**eviction, "budget": entries})
    if blocks * PAGE_SIZE != entries:
        raise RuntimeError(f"{blocks} blocks are retained of {length} tokens, not {entries} / 32")


def _prefill(llm: "LLM", prompts: list[list[int]], entries: int, job: Job) -> list[str]:
    """Starts a request for every prompt and steps until all have their first token."""
    from vllm import SamplingParams

    engine = llm.llm_engine
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
    engine.step()  # packs what the last prompts retain
    return ids


def _median_step(llm: "LLM", num_requests: int, steps: int) -> float:
    """Times a turn's steps; the first one, with the other engine's data in the caches, is left out.

    Raises:
        RuntimeError: If they are not steps in which every request decodes a token.
    """
    milliseconds = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        if len(llm.llm_engine.step()) != num_requests:
            raise RuntimeError("a request was preempted or ended while steps were timed")
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return statistics.median(milliseconds[1:])


if __name__ == "__main__":
    run_script(main, measure, answer_in_turns)
