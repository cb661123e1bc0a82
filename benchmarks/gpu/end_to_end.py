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
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from _engine import (
    CONFIG_KEY,
    BenchmarkError,
    Job,
    describe,
    run_child,
    run_script,
    table_console,
)

if TYPE_CHECKING:
    from vllm import LLM

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
WORKLOADS = {"16K -> 512": (16, 16384, 512), "4K -> 1K": (24, 4096, 1024)}
"""Prompts, tokens of each, tokens generated."""
ENGINES: dict[str, dict[str, Any]] = {
    "stock, 12 GiB": {"eviction": None, "kv_gib": 12, "budgets": [None]},
    "plugin, 12 GiB": {
        "eviction": {"budget": 0.125, "allow_override": ["method", "budget"]},
        "kv_gib": 12,
        "budgets": [0.125, 0.25, 0.0625, "nothing dropped"],
    },
    "stock, room for all": {"eviction": None, "kv_gib": 40, "budgets": [None]},
}


def main() -> None:
    """Runs the engines one after the other and prints a table."""
    if not torch.cuda.is_available():
        raise BenchmarkError("there is no GPU")
    table = Table("engine", "budget", "workload", "tokens/s", "most of the blocks", "GiB at most")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B))
        for name, job in ENGINES.items():
            result = run_child(__file__, {**job, "model": folder})
            print(json.dumps({"engine": name, **result}), flush=True)
            for run in result["runs"]:
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

    settings: dict[str, Any] = {}
    if job["eviction"] is not None:
        settings["additional_config"] = {CONFIG_KEY: job["eviction"]}
    llm = LLM(
        job["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=17408,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=job["kv_gib"] * 2**30,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **settings,
    )
    generate(llm, (2, 2048, 8), job["budgets"][0])
    runs = [
        {"budget": budget, "workload": name, **generate(llm, workload, budget)}
        for budget in job["budgets"]
        for name, workload in WORKLOADS.items()
    ]
    (allocated,) = llm.collective_rpc(most_allocated)
    return {**describe(llm), "runs": runs, "max_allocated": allocated}


def most_allocated(worker: Any) -> int:
    """Bytes that a worker's tensors took at most."""
    return torch.cuda.max_memory_allocated(worker.device)


def generate(
    llm: "LLM", workload: tuple[int, int, int], budget: float | str | None
) -> dict[str, float]:
    """Answers all prompts of a workload at once."""
    from vllm import SamplingParams

    num_prompts, prompt_len, num_new = workload
    random = torch.Generator().manual_seed(0)
    vocabulary = LLAMA_8B["vocab_size"]
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
