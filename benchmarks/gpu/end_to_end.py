"""Throughput and memory on a GPU against stock vLLM: the same bytes, room for everything, no drop.

An 8B Llama made on the spot with random weights (`load_format="dummy"`), graphs on, prompts of
random tokens. Each engine runs in a fresh process and prints one JSON line when it is done.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from _device import HAS_CARD, row
from _engine import CONFIG_KEY, BenchmarkError, Job, describe, run_child, run_script
from _models import LLAMA_8B, TINY, write
from proofs import NOT_LOADED, NOTHING_DROPPED

from vllm_kvselect.offline.tables import console as table_console

if TYPE_CHECKING:
    from vllm import LLM

WORKLOADS = {"16K -> 512": (16, 16384, 512), "4K -> 1K": (24, 4096, 1024)}
DRY_WORKLOADS = {"200 -> 8": (2, 200, 8)}
"""Prompts, tokens of each, tokens generated."""
GRAPHS = [1, 2, 4, 8, 16, 24, 32, 48, 64]
"""Sizes of batches for which every engine captures graphs; vLLM's own list takes longer."""
ENGINES: dict[str, dict[str, Any]] = {
    "stock": {"eviction": None, "kv_gib": 12, "budgets": [None]},
    "plugin": {
        "eviction": {"budget": 0.125, "allow_override": ["method", "budget"]},
        "kv_gib": 12,
        "budgets": [0.125, 0.0625, "nothing dropped"],
    },
    "room": {"eviction": None, "kv_gib": 40, "budgets": [None]},
}
"""Stock and the plugin with the same bytes, and stock with room for all requests at once."""


def main(
    engines: Annotated[str, typer.Option(help="Of stock, plugin, room.")] = ",".join(ENGINES),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tiny, on any device.")] = False,
) -> None:
    """Runs the engines one after the other and prints a table."""
    if not torch.cuda.is_available() and not dry_run:
        raise BenchmarkError("there is no GPU")
    if unknown := {*engines.split(",")} - ENGINES.keys():
        raise BenchmarkError(f"unknown engines {sorted(unknown)}; there are {', '.join(ENGINES)}")
    table = Table("engine", "budget", "workload", "tokens/s", "most of the blocks", "GiB at most")
    with tempfile.TemporaryDirectory() as folder:
        write(folder, TINY if dry_run else LLAMA_8B)
        for engine in engines.split(","):
            job = ENGINES[engine]
            name = f"{engine}, {job['kv_gib']} GiB"
            result = run_child(__file__, {**job, "model": folder, "dry_run": dry_run})
            print(json.dumps({"engine": name, **result}), flush=True)
            for run in result["runs"]:
                row(
                    f"{name}, budget {run['budget'] or 'none'}, {run['workload']}",
                    f"{run['tokens_per_second']:.0f} tokens/s, first token of a prompt alone after "
                    f"{run['ttft'] * 1e3:.0f} ms, {run['usage']:.0%} of the blocks at most",
                )
                table.add_row(
                    name,
                    str(run["budget"] or ""),
                    run["workload"],
                    f"{run['tokens_per_second']:.0f}",
                    f"{run['usage']:.0%} of {result['num_blocks']}",
                    f"{result['max_allocated'] / 2**30:.1f}",
                )
    table_console().print(table)


def measure(job: Job) -> dict[str, Any]:
    """An engine's part, in a process of its own."""
    # For `most_allocated`, which is sent to the worker.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM

    dry_run, settings = job["dry_run"], dict[str, Any]()
    workloads = DRY_WORKLOADS if dry_run else WORKLOADS
    if job["eviction"] is not None:
        settings["additional_config"] = {CONFIG_KEY: job["eviction"]}
    llm = LLM(
        job["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32" if dry_run else "bfloat16",
        max_model_len=512 if dry_run else 17408,
        max_num_seqs=64,
        max_num_batched_tokens=512 if dry_run else 8192,
        kv_cache_memory_bytes=2**25 if dry_run else job["kv_gib"] * 2**30,
        enforce_eager=dry_run,
        compilation_config={} if dry_run else {"cudagraph_capture_sizes": GRAPHS},
        enable_prefix_caching=False,
        disable_log_stats=False,
        **settings,
    )
    is_ours = llm.collective_rpc(has_eviction)[0]
    if job["eviction"] is not None and not is_ours:
        raise BenchmarkError(NOT_LOADED)
    generate(llm, (2, 200 if dry_run else 2048, 8), job["budgets"][0])
    runs = [
        {"budget": budget, "workload": name, **generate(llm, workload, budget)}
        for budget in job["budgets"]
        if not dry_run or budget != 0.0625  # less than a window of so short a prompt
        for name, workload in workloads.items()
    ]
    if is_ours and not llm.collective_rpc("kv_eviction_stats")[0]["num_evicted"]:
        raise BenchmarkError(NOTHING_DROPPED)
    (allocated,) = llm.collective_rpc(most_allocated)
    return {**describe(llm), "runs": runs, "max_allocated": allocated}


def most_allocated(worker: Any) -> int:
    """Bytes that a worker's tensors took at most."""
    return torch.cuda.max_memory_allocated(worker.device) if torch.cuda.is_available() else 0


def has_eviction(worker: Any) -> bool:
    """Whether a worker is ours."""
    return hasattr(worker, "kv_eviction_stats")


def generate(
    llm: "LLM", workload: tuple[int, int, int], budget: float | str | None
) -> dict[str, float]:
    """Answers all prompts of a workload at once."""
    from vllm import SamplingParams

    num_prompts, prompt_len, num_new = workload
    random = torch.Generator().manual_seed(0)
    vocabulary = (LLAMA_8B if HAS_CARD else TINY)["vocab_size"]
    prompts = torch.randint(vocabulary, (num_prompts, prompt_len), generator=random).tolist()
    own = {"kv_eviction_budget": budget}
    if isinstance(budget, str):
        own = {"kv_eviction": "none"}
    params = SamplingParams(
        max_tokens=num_new,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        extra_args=own if budget else None,
    )
    first = SamplingParams(max_tokens=1, detokenize=False, extra_args=params.extra_args)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompts[0]}], first, use_tqdm=False)
    ttft = time.perf_counter() - start
    done, usages = Event(), [0.0]
    watching = Thread(target=watch, args=(llm, done, usages))
    watching.start()
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    done.set()
    watching.join()
    return {
        "seconds": seconds,
        "tokens_per_second": num_prompts * num_new / seconds,
        "usage": max(usages),
        "ttft": ttft,
    }


def watch(llm: "LLM", done: Event, usages: list[float]) -> None:
    """Notes the share of blocks held, ten times a second."""
    while not done.wait(0.1):
        usages += [
            metric.value
            for metric in llm.get_metrics()
            if metric.name == "vllm:kv_cache_usage_perc"
        ]


if __name__ == "__main__":
    run_script(main, measure)
