"""Long prompts: stock vLLM, and the plugin with one cut and with cuts in prompts, in turn.

`throughput` serves all prompts at once in little memory, and by stock also in memory that holds
everything. `first-token` waits for one prompt after the other, in a pool that holds the longest.
`bounded` serves prompts longer than the pool, which stock cannot. Lengths beyond the model's own
are for timing only. Every engine runs in a fresh process. The last
line of the output is one JSON object with every setting and version.
"""

import json
import statistics
import tempfile
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
    eviction_stats,
    reset_eviction_stats,
    run_child,
    run_in_turn,
    run_script,
)
from _texts import plain_prompts
from _throughput import all_at_once, first_token_seconds, generate, watched
from rich.table import Table

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.machine import dtype_name, fast_dtype, machine
from vllm_kvselect.offline.tables import console as table_console
from vllm_kvselect.tiny_model import shallow_copy

Result = dict[str, Any]
app = typer.Typer(add_completion=False, no_args_is_help=True)
Model = Annotated[str, typer.Option(help="Model folder; by default the small model.")]
Method = Annotated[str, typer.Option(help="The plugin's method.")]
Budget = Annotated[int, typer.Option(help="Entries per KV head.")]
Interval = Annotated[int, typer.Option(help="Tokens from one cut in a prompt to the next.")]
Rounds = Annotated[int, typer.Option(min=1)]


@app.command()
def throughput(
    model: Model = "",
    num_prompts: Annotated[int, typer.Option(min=1)] = 8,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 7000,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 600,
    kv_mib: Annotated[int, typer.Option(min=1, help="KV cache of all engines but one.")] = 192,
    method: Method = "layer-probe",
    budget: Budget = 512,
    decode_budget: Annotated[int, typer.Option(min=0, help="0: no rounds.")] = 512,
    interval: Interval = 512,
    rounds: Rounds = 1,
    dtype: str = dtype_name(fast_dtype()),
) -> None:
    """Measures the seconds for all prompts at once."""
    settings = dict(locals())
    model = model or default_model()
    *prompts, warm_up = _prompts(model, num_prompts + 1, prompt_len)
    stock = _job(model, dtype, prompt_len + output_len, kv_mib * MIB)
    stock |= {"task": "throughput", "prompts": prompts, "warm_up": warm_up}
    stock |= {"output_len": output_len}
    # A block more for each, and one that vLLM keeps.
    for_all = num_prompts * (prompt_len + output_len + 32) + 32
    roomy = {**stock, "kv_bytes": bytes_of_tokens(model, dtype, for_all)}
    bounded = {"decode_budget": decode_budget}
    once = EvictionConfig.parse({"method": method, "budget": budget, **bounded})
    often = once.model_copy(update={"prompt_interval": interval})
    jobs = {
        "stock": stock,
        "stock with room": roomy,
        "one cut": {**stock, "eviction": once.model_dump()},
        "cuts in prompts": {**stock, "eviction": often.model_dump()},
    }
    measured = run_in_turn(__file__, jobs, rounds)
    table = Table(title="All prompts at once")
    for column in (
        "engine",
        "seconds",
        "against stock",
        "requests/step",
        "preemptions",
        "blocks a request",
    ):
        table.add_column(column, justify="left" if column == "engine" else "right")
    ratios = {}
    for name, results in measured.items():
        seconds = statistics.median(each["seconds"] for each in results)
        ratios[name] = round(_ratio(measured, name, "seconds"), 3)
        last = results[-1]
        table.add_row(
            name,
            f"{seconds:.1f}",
            f"{ratios[name]:.2f}x",
            f"{last['output_tokens'] / last['steps']:.1f}",
            str(last["preemptions"]),
            f"{last['most_blocks_per_request']:.0f} of {last['num_blocks'] - 1}",
        )
    table_console().print(table)
    settings["model"] = Path(model).name
    print(json.dumps({"ratios": ratios, "settings": settings, "machine": machine()}))


@app.command("first-token")
def first_token(
    model: Model = "",
    num_layers: Annotated[int, typer.Option(help="The model's first layers; 0: all.")] = 6,
    lengths: Annotated[str, typer.Option(help="Tokens per prompt.")] = "8192,32768",
    method: Method = "layer-keydiff",
    budget: Budget = 2048,
    interval: Interval = 512,
    rounds: Rounds = 1,
    dtype: str = dtype_name(fast_dtype()),
) -> None:
    """Measures the seconds to the first token of a prompt alone."""
    settings = dict(locals())
    whole, all_lengths = Path(model or default_model()), [int(each) for each in lengths.split(",")]
    longest = max(all_lengths)
    with _first_layers(whole, num_layers) as folder:
        room = bytes_of_tokens(folder, dtype, longest + 640)
        stock = _job(folder, dtype, longest + 16, room)
        stock |= {"task": "first token", "prompts": _prompts(folder, 2, longest)}
        stock |= {"lengths": all_lengths, "prefix_caching": False}
        once = EvictionConfig.parse({"method": method, "budget": budget})
        often = once.model_copy(update={"prompt_interval": interval})
        jobs = {
            "stock": stock,
            "one cut": {**stock, "eviction": once.model_dump()},
            "cuts in prompts": {**stock, "eviction": often.model_dump()},
        }
        measured = run_in_turn(__file__, jobs, rounds)
    table = Table(title="First token of a prompt alone")
    for column in ("tokens", *jobs, "cuts in prompts against stock"):
        table.add_column(column, justify="right")
    ratios = {}
    for length in all_lengths:
        seconds = [statistics.median(r[str(length)] for r in each) for each in measured.values()]
        ratios[length] = round(_ratio(measured, "cuts in prompts", str(length)), 3)
        cells = [f"{each:.2f} s" for each in seconds]
        table.add_row(str(length), *cells, f"{ratios[length]:.2f}x")
    table_console().print(table)
    settings["model"] = whole.name
    print(json.dumps({"ratios": ratios, "settings": settings, "machine": machine()}))


@app.command()
def bounded(
    model: Model = "",
    num_layers: Annotated[int, typer.Option(help="The model's first layers; 0: all.")] = 6,
    num_prompts: Annotated[int, typer.Option(min=1)] = 1,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 65536,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 16,
    pool_tokens: Annotated[int, typer.Option(min=1, help="Tokens that the KV cache holds.")] = 6000,
    method: Method = "layer-keydiff",
    budget: Budget = 2048,
    interval: Interval = 512,
    dtype: str = dtype_name(fast_dtype()),
) -> None:
    """Serves prompts longer than the pool, and says how many blocks one of them held at most."""
    settings = dict(locals())
    whole = Path(model or default_model())
    with _first_layers(whole, num_layers) as folder:
        eviction = EvictionConfig.parse(
            {
                "method": method,
                "budget": budget,
                "prompt_interval": interval,
                "decode_budget": budget,
                "check_integrity": True,
            }
        )
        room = bytes_of_tokens(folder, dtype, pool_tokens)
        job = _job(folder, dtype, prompt_len + output_len, room)
        job |= {"task": "bounded", "prompts": _prompts(folder, num_prompts, prompt_len)}
        job |= {"output_len": output_len, "prefix_caching": False}
        job["eviction"] = eviction.model_dump()
        found = run_child(__file__, job)
    settings["model"] = whole.name
    print(json.dumps({**found, "settings": settings, "machine": machine()}))


@contextmanager
def _first_layers(model: Path, num_layers: int) -> Iterator[str]:
    """A folder with the model's first layers, or the model's own for 0."""
    if not num_layers:
        yield str(model)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield str(shallow_copy(model, num_layers, Path(folder) / "model"))


def _job(model: str, dtype: str, max_model_len: int, kv_bytes: int) -> Job:
    sizes = {"max_model_len": max_model_len, "kv_bytes": kv_bytes, "block_size": 32}
    return {"model": model, "dtype": dtype, "enforce_eager": True, "eviction": None, **sizes}


def _prompts(model: str, count: int, length: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    return plain_prompts(AutoTokenizer.from_pretrained(model), count, length)[0]


def _ratio(measured: dict[str, list[Result]], name: str, part: str) -> float:
    """How many times as fast as stock in the same round, the median."""
    pairs = zip(measured["stock"], measured[name], strict=True)
    return statistics.median(theirs[part] / ours[part] for theirs, ours in pairs)


def measure(job: Job) -> Result:
    """The child's part."""
    import time

    from _engine import engine_arguments
    from vllm import LLM

    if job["task"] == "throughput":
        return all_at_once(LLM(**engine_arguments(job)), job)
    longest = {"max_position_embeddings": job["max_model_len"]}
    llm = LLM(**engine_arguments(job), hf_overrides=longest)
    if job["task"] == "bounded":
        held, started = watched(llm), time.perf_counter()
        generate(llm, job["prompts"], job["output_len"])
        num_blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks - 1  # vLLM keeps one
        return {
            "seconds": round(time.perf_counter() - started, 1),
            "blocks": num_blocks,
            "most_blocks_per_request": round(max(held) * num_blocks),
        }
    warm_up, prompt = job["prompts"]
    first_token_seconds(llm, [warm_up[:4096]])
    reset_eviction_stats(llm, job)
    prompts = [prompt[:length] for length in job["lengths"]]
    seconds = first_token_seconds(llm, prompts)
    eviction_stats(llm, {**job, "prompts": prompts})
    return dict(zip(map(str, job["lengths"]), seconds, strict=True))


if __name__ == "__main__":
    run_script(app, measure)
