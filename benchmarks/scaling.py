"""How selection grows with the prompt: its share of the prefill, and the memory it takes.

The share is the plugin's own clock around selection and packing, between a prompt's first token and
its second, over stock vLLM's prefill of the same prompt, one prompt at a time, both in fresh
processes by turns. Memory is what one layer's selection adds to the peak of a process's resident
memory, on random tensors in the shape of the small model. Of methods that remember a number of each
entry, such as `layer-probe`, one layer alone does not tell it. The last line of the output is one
JSON object.
"""

import ctypes
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from _engine import (
    MIB,
    Job,
    default_model,
    describe,
    empty_prefix_cache,
    engine_arguments,
    eviction_stats,
    reset_eviction_stats,
    run_child,
    run_in_turn,
    run_script,
)
from _texts import plain_prompts
from _throughput import first_token_seconds
from rich.console import Console
from rich.table import Table

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.machine import dtype_name, fast_dtype, machine
from vllm_kvselect.offline.tables import console as table_console
from vllm_kvselect.registry import METHODS

Result = dict[str, Any]
BLOCK_SIZE = 32


def main(
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    lengths: Annotated[str, typer.Option(help="Tokens per prompt.")] = "1024,2048,4096,8000",
    method: Annotated[str, typer.Option(help="The plugin's method.")] = "adakv-perturb",
    budget: Annotated[float, typer.Option(help="Fraction of the prompt.")] = 0.2,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of each length.")] = 3,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Measures time and memory of selection for prompts of several lengths."""
    settings = dict(locals())
    model = model or default_model()
    all_lengths = [int(length) for length in lengths.split(",")]
    eviction = EvictionConfig.parse({"method": method, "budget": budget}).model_dump()
    stock: Job = {
        "model": model,
        "dtype": dtype_name(fast_dtype()),
        "enforce_eager": True,
        "kv_bytes": 512 * MIB,
        "max_model_len": max(all_lengths) + 8,
        "lengths": all_lengths,
        "num_prompts": num_prompts,
        "eviction": None,
    }
    jobs = {"stock": stock, "plugin": {**stock, "eviction": eviction}}
    measured = run_in_turn(__file__, jobs, rounds)
    with Console(stderr=True).status("memory"):
        memory = [
            None
            if METHODS[method].scorer.keeps_scores
            else run_child(__file__, {"memory_of": length, "eviction": eviction})["bytes"]
            for length in all_lengths
        ]
    rows = [_row(index, length, measured) for index, length in enumerate(all_lengths)]
    rows = [{**row, "memory_bytes": extra} for row, extra in zip(rows, memory, strict=True)]
    _print_table(rows)
    settings |= {"model": Path(model).name}
    print(json.dumps({"lengths": rows, "settings": settings, "machine": machine()}))


def _row(index: int, length: int, measured: dict[str, list[Result]]) -> dict[str, Any]:
    stock, plugin = (
        [each["prefill_seconds"][index] for each in measured[name]] for name in ("stock", "plugin")
    )
    selection = [each["selection_seconds"][index] for each in measured["plugin"]]
    shares = [ours / theirs for ours, theirs in zip(selection, stock, strict=True)]
    return {
        "tokens": length,
        "stock_seconds": round(statistics.median(stock), 4),
        "plugin_seconds": round(statistics.median(plugin), 4),
        "selection_seconds": round(statistics.median(selection), 4),
        "share": round(statistics.median(shares), 4),
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Selection by length of the prompt")
    for column in ("tokens", "prefill, stock", "prefill, plugin", "selection", "share", "memory"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["tokens"]),
            f"{row['stock_seconds']:.3f} s",
            f"{row['plugin_seconds']:.3f} s",
            f"{row['selection_seconds'] * 1e3:.1f} ms",
            f"{row['share']:.1%}",
            "-" if row["memory_bytes"] is None else f"{row['memory_bytes'] / MIB:.1f} MiB",
        )
    table_console().print(table)


def measure(job: Job) -> Result:
    """The child's part: prefills on one engine, or the memory of one selection without any."""
    if "memory_of" in job:
        return {"bytes": _extra_memory(job["memory_of"], EvictionConfig.parse(job["eviction"]))}
    from transformers import AutoTokenizer
    from vllm import LLM

    llm = LLM(**engine_arguments(job))
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    prefill, selection = [], []
    for length in job["lengths"]:
        prompts, _ = plain_prompts(tokenizer, job["num_prompts"] + 1, length)
        first_token_seconds(llm, prompts[-1:])  # what is done once for a length is done here
        empty_prefix_cache(llm)
        reset_eviction_stats(llm, job)
        prefill.append(statistics.fmean(first_token_seconds(llm, prompts[:-1])))
        stats = eviction_stats(llm, {**job, "prompts": prompts[:-1]})
        selection.append(stats["selection_seconds"] / job["num_prompts"])
        empty_prefix_cache(llm)
    return {"prefill_seconds": prefill, "selection_seconds": selection, **describe(llm)}


def _extra_memory(length: int, config: EvictionConfig) -> int:
    """Bytes that selection adds to the peak of this process, the retained indices included."""
    import torch
    from _selection import layer
    from selection import SHAPE

    from vllm_kvselect.choice import retain
    from vllm_kvselect.kernels import cpu

    torch.set_num_threads(1)
    num_tokens = (length - config.window) // BLOCK_SIZE * BLOCK_SIZE
    num_packed = max(1, round(config.budget * length) // BLOCK_SIZE - 1)

    def select(length: int, num_tokens: int, num_packed: int) -> int:
        whole = layer(SHAPE, length, config.window, "cpu")
        inputs = replace(whole, value=whole.value[:, :num_tokens])
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that selection would take without a trace
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        retain([inputs], num_packed, BLOCK_SIZE, config, kernels)
        return _resident("VmHWM") - before

    kernels = cpu.load()
    select(128, 64, 1)  # libraries and their buffers are there from now on
    return select(length, num_tokens, num_packed)


def _resident(field: str) -> int:
    """Resident memory of this process in bytes, or its peak."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    run_script(main, measure)
