"""Thousands of mixed requests on one crowded engine: each must give what it gives alone.

Two fresh processes serve the same requests in float32: one alone, one after the other, with room
for everything; one all together, streamed, in a pool so small that they are preempted all the
time, with clients that leave. The last line of the output is one JSON object.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import _root  # noqa: F401 (makes `tests` importable)
import typer
from _engine import (
    Job,
    default_model,
    describe,
    engine_arguments,
    machine,
    run_child,
    run_script,
    table_console,
)
from _texts import plain_prompts
from rich.console import Console
from rich.table import Table

from tests.mixture import (
    BLOCK_SIZE,
    GREEDY,
    KINDS,
    MAX_MODEL_LEN,
    SERVER,
    Answer,
    Request,
    difference,
    draw,
    serve,
    serve_alone,
)
from vllm_kvselect.shallow_model import shallow_copy

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}


def main(
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    num_layers: Annotated[int, typer.Option(min=1, help="Layers of the model to keep.")] = 4,
    num_requests: Annotated[int, typer.Option(min=1)] = 2000,
    num_distinct: Annotated[int, typer.Option(min=1, help="Different ones among them.")] = 400,
    num_blocks: Annotated[int, typer.Option(help="Blocks of the crowded pool.")] = 24,
    max_unfinished: Annotated[int, typer.Option(help="Requests that wait or run at once.")] = 16,
    preempt: Annotated[
        float, typer.Option(help="Probability of preempting everybody, each step.")
    ] = 0.01,
    speculation: Annotated[
        bool, typer.Option("--speculation", help="n-gram speculation, greedy requests only.")
    ] = False,
    seed: int = 0,
) -> None:
    """Counts the requests whose answers differ, and fails if there are any."""
    settings = dict(locals())
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model or default_model())
    ((text,), source) = plain_prompts(tokenizer, 1, 20_000)
    kinds = GREEDY if speculation else KINDS
    requests = draw(text, num_requests, min(num_distinct, num_requests), seed, kinds)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = shallow_copy(Path(model or default_model()), num_layers, Path(scratch, "model"))
        crowded: Job = {
            "model": str(folder),
            "dtype": "float32",
            "enforce_eager": True,
            "kv_bytes": num_blocks * _block_bytes(folder),
            "max_model_len": MAX_MODEL_LEN,
            "eviction": SERVER,
            "requests": [asdict(request) for request in requests],
            "serve": {"max_unfinished": max_unfinished, "preempt": preempt, "seed": seed},
            "engine": {"max_num_batched_tokens": 150, "max_num_seqs": 8},
        }
        if speculation:
            crowded["engine"]["speculative_config"] = NGRAM
        alone = {
            **crowded,
            "kv_bytes": 4 * crowded["kv_bytes"],
            "serve": None,
            "engine": {"enable_prefix_caching": False},
        }
        with console.status(f"{num_distinct} different requests, alone"):
            expected = run_child(__file__, alone)
        with console.status(f"{num_requests} requests together"):
            together = run_child(__file__, crowded)
    differences = _differences(requests, expected["answers"], together["answers"])
    summary = _summary(requests, expected, together, differences)
    _print_table(requests, differences, summary)
    settings |= {"model": Path(model or default_model()).name, "text": source}
    print(json.dumps({**summary, "settings": settings, "machine": machine()}))
    if differences:
        sys.exit(1)


def measure(job: Job) -> dict[str, Any]:
    """The child's part: serves the requests alone or together, as the job says."""
    from vllm import LLM

    llm = LLM(**engine_arguments(job), **job["engine"])
    requests = [Request(**request) for request in job["requests"]]
    start = time.perf_counter()
    if job["serve"] is None:
        answers: Any = serve_alone(llm, requests)
        seen: Counter[str] = Counter()
    else:
        service = serve(llm, requests, stream=True, **job["serve"])
        answers, seen = dict(enumerate(service.answers)), service.seen
    (counted,) = llm.collective_rpc("kv_eviction_stats")
    return {
        "seconds": time.perf_counter() - start,
        "answers": {key: asdict(answer) for key, answer in answers.items()},
        "seen": seen,
        "num_evicted": counted["num_evicted"],
        "contexts_found": sum(
            found.value
            for found in llm.get_metrics()
            if found.name == "vllm:kv_eviction_context_hits"
        ),
        "async_scheduling": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
        **describe(llm),
    }


def _block_bytes(model: Path) -> int:
    """Bytes of a block of a float32 KV cache."""
    config = json.loads((model / "config.json").read_text())
    entry_bytes = 2 * 4 * config["head_dim"]
    return config["num_hidden_layers"] * config["num_key_value_heads"] * BLOCK_SIZE * entry_bytes


def _differences(
    requests: list[Request], expected: dict[str, Any], together: dict[str, Any]
) -> list[tuple[Request, str]]:
    alone = {key: Answer.parse(answer) for key, answer in expected.items()}
    found = [
        (request, difference(request, alone[request.key], Answer.parse(together[str(index)])))
        for index, request in enumerate(requests)
    ]
    return [(request, text) for request, text in found if text is not None]


def _summary(
    requests: list[Request],
    expected: dict[str, Any],
    together: dict[str, Any],
    differences: list[tuple[Request, str]],
) -> dict[str, Any]:
    seen = together["seen"]
    return {
        "differences": len(differences),
        "requests": len(requests),
        "different_requests": len(expected["answers"]),
        "left_early": seen["left"],
        "preemptions": seen["preemptions"],
        "resets_of_everybody": seen["resets"],
        "prompts_evicted": together["num_evicted"],
        "cached_tokens": seen["cached tokens"],
        "contexts_found": together["contexts_found"],
        "tokens": seen["tokens"],
        "seconds_alone": round(expected["seconds"], 1),
        "seconds_together": round(together["seconds"], 1),
        "num_blocks": together["num_blocks"],
        "async_scheduling": together["async_scheduling"],
        "vllm": together["vllm"],
    }


def _print_table(
    requests: list[Request], differences: list[tuple[Request, str]], summary: dict[str, Any]
) -> None:
    console = table_console()
    table = Table(title="Requests together and alone")
    for column in ("kind", "requests", "differences"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    different = Counter(request.kind for request, _ in differences)
    for kind, number in sorted(Counter(request.kind for request in requests).items()):
        table.add_row(kind, str(number), str(different[kind]))
    console.print(table)
    for request, text in differences[:5]:
        console.print(f"{request.kind} {request.sampling}, {len(request.prompt)} tokens: {text}")
    console.print(
        f"{summary['preemptions']} preemptions, {summary['prompts_evicted']} prompts evicted, "
        f"{summary['left_early']} clients left, {summary['cached_tokens']} tokens from the "
        f"prefix cache, {summary['contexts_found']} contexts found; "
        f"{summary['seconds_alone']} s alone, {summary['seconds_together']} s together"
    )


if __name__ == "__main__":
    run_script(main, measure)
