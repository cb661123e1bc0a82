"""Time to first token: stock vLLM and sparse prefills, in turn, from short prompts to long ones.

Each length is prefilled by both engines, in fresh processes by turns. Beside the time stand the
share of attention in it, the share of the estimate of which blocks to read, and the floor: what
attention over the blocks that are read takes by itself. Lengths beyond the model's own are for
timing only. The last line of the output is one JSON object with every setting and version.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from _engine import (
    MIB,
    Job,
    bytes_of_tokens,
    default_model,
    describe,
    empty_prefix_cache,
    engine_arguments,
    eviction_stats,
    reset_eviction_stats,
    run_in_turn,
    run_script,
)
from _texts import plain_prompts
from _throughput import first_token_seconds
from rich.table import Table

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.machine import dtype_name, fast_dtype, machine
from vllm_kvselect.offline.tables import console as table_console
from vllm_kvselect.tiny_model import shallow_copy

Result = dict[str, Any]
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 8192,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}
"""Its layers; the vocabulary is cut down, since only the prefill is timed."""


def main(
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    llama_layers: Annotated[
        int, typer.Option(help="Instead: so many layers like Llama-3-8B's, random weights.")
    ] = 0,
    num_layers: Annotated[int, typer.Option(help="Its first layers only; 0: all.")] = 0,
    lengths: Annotated[str, typer.Option(help="Tokens per prompt.")] = "2048,8192,32768",
    budget: Annotated[int, typer.Option(help="Tokens that a segment reads before it.")] = 2048,
    dense_until: Annotated[int, typer.Option(help="First tokens, which read all.")] = 4096,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of each length.")] = 1,
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    with_off: Annotated[
        bool,
        typer.Option("--with-off", help="Also an engine where requests may choose, and none does."),
    ] = False,
    dtype: str = dtype_name(fast_dtype()),
) -> None:
    """Measures the time to the first token, stock and sparse."""
    settings = dict(locals())
    all_lengths = [int(length) for length in lengths.split(",")]
    prefill = {
        "method": "none",
        "prefill": "critiprefill",
        "prefill_budget": budget,
        "prefill_dense_until": dense_until,
    }
    with tempfile.TemporaryDirectory() as folder:
        if llama_layers:
            model = _random_model(Path(folder), llama_layers)
        elif num_layers:
            whole = Path(model or default_model())
            model = str(shallow_copy(whole, num_layers, Path(folder) / "model"))
        stock: Job = {
            "model": model or default_model(),
            "is_random": bool(llama_layers),
            "dtype": dtype,
            "enforce_eager": True,
            "max_model_len": max(all_lengths) + 8,
            "lengths": all_lengths,
            "num_prompts": num_prompts,
            "eviction": None,
        }
        # The longest prompt, rounded up to whole blocks of 128 tokens, and some more.
        room = bytes_of_tokens(stock["model"], dtype, stock["max_model_len"] + 512)
        stock["kv_bytes"] = room + MIB
        jobs = {"stock": stock, "sparse": {**stock, "eviction": prefill}}
        if with_off:
            off = {"prefill": "dense", "allow_override": ["prefill", "prefill_budget"]}
            jobs["off"] = {**stock, "eviction": prefill | off}
        measured = run_in_turn(__file__, jobs, rounds)
    rows = [_row(index, length, measured) for index, length in enumerate(all_lengths)]
    _print_table(rows)
    settings |= {"model": Path(model).name, "eviction": EvictionConfig.parse(prefill).model_dump()}
    print(json.dumps({"lengths": rows, "settings": settings, "machine": machine()}))


def _random_model(folder: Path, num_layers: int) -> str:
    config = {**LLAMA_3_8B, "num_hidden_layers": num_layers, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def _row(index: int, length: int, measured: dict[str, list[Result]]) -> Result:
    def median(name: str, part: str) -> float:
        return statistics.median(each[part][index] for each in measured[name])

    def speedup(name: str) -> float:
        ratios = [
            theirs["first_token_seconds"][index] / ours["first_token_seconds"][index]
            for theirs, ours in zip(measured["stock"], measured[name], strict=True)
        ]
        return round(statistics.median(ratios), 3)

    stock, sparse = (median(name, "first_token_seconds") for name in ("stock", "sparse"))
    return {
        "tokens": length,
        "stock_seconds": round(stock, 3),
        "sparse_seconds": round(sparse, 3),
        "speedup": speedup("sparse"),
        "off_ratio": speedup("off") if "off" in measured else None,
        "stock_attention_share": round(median("stock", "attention_seconds") / stock, 3),
        "floor_share": round(median("sparse", "attention_seconds") / sparse, 3),
        "estimate_share": round(median("sparse", "estimate_seconds") / sparse, 4),
    }


def _print_table(rows: list[Result]) -> None:
    table = Table(title="Time to first token")
    shares = ("attention in stock", "attention in sparse", "estimate in sparse")
    for column in ("tokens", "stock", "sparse", "ratio", "off", *shares):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["tokens"]),
            f"{row['stock_seconds']:.2f} s",
            f"{row['sparse_seconds']:.2f} s",
            f"{row['speedup']:.2f}x",
            f"{row['off_ratio']:.2f}x" if row["off_ratio"] else "",
            f"{row['stock_attention_share']:.0%}",
            f"{row['floor_share']:.0%}",
            f"{row['estimate_share']:.1%}",
        )
    table_console().print(table)


def measure(job: Job) -> Result:
    """The child's part: prefills on one engine, in this process, where attention can be timed."""
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    options: dict[str, Any] = {"hf_overrides": {"max_position_embeddings": job["max_model_len"]}}
    if job["is_random"]:
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
    llm = LLM(**engine_arguments(job), **options)
    first, attention, estimate = [], [], []
    with _timed_attention() as seconds:
        for length in job["lengths"]:
            prompts = _prompts(job, length)
            first_token_seconds(llm, [prompts[-1][: min(length, 4096)]])
            empty_prefix_cache(llm)
            reset_eviction_stats(llm, job)
            seconds.clear()
            first.append(statistics.fmean(first_token_seconds(llm, prompts[:-1])))
            stats = eviction_stats(llm, {**job, "prompts": []})
            chosen = stats.get("estimate_seconds", 0.0)
            estimate.append(chosen / job["num_prompts"])
            attention.append((sum(seconds) - chosen) / job["num_prompts"])
            empty_prefix_cache(llm)
    parts = {"attention_seconds": attention, "estimate_seconds": estimate}
    return {"first_token_seconds": first, **parts, **describe(llm)}


def _prompts(job: Job, length: int) -> list[list[int]]:
    """As many prompts as are measured, and one to warm up with."""
    if job["is_random"]:
        import torch

        shape = (job["num_prompts"] + 1, length)
        tokens: list[list[int]] = torch.randint(LLAMA_3_8B["vocab_size"], shape).tolist()
        return tokens
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    return plain_prompts(tokenizer, job["num_prompts"] + 1, length)[0]


@contextmanager
def _timed_attention() -> Iterator[list[float]]:
    """Adds the seconds of every layer's attention to a list, that of stock as well as ours."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from vllm_kvselect.engine.step.layer import HeadwiseImpl

    seconds: list[float] = []
    originals = {each: each.forward for each in (CPUAttentionBackendImpl, HeadwiseImpl)}
    is_inside = False

    def timed(forward: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:  # ours calls vLLM's
                return forward(*args, **kwargs)
            is_inside, started = True, time.perf_counter()
            try:
                return forward(*args, **kwargs)
            finally:
                is_inside = False
                seconds.append(time.perf_counter() - started)

        return wrapper

    for each, forward in originals.items():
        each.forward = timed(forward)
    try:
        yield seconds
    finally:
        for each, forward in originals.items():
            each.forward = forward


if __name__ == "__main__":
    run_script(main, measure)
