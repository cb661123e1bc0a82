"""Thousands of mixed requests on one crowded engine: each must give what it gives alone.

Two fresh processes serve the same requests in float32: one alone, one after the other, with room
for everything; one all together, streamed, in a pool so small that they are preempted all the
time, with clients that leave. The last line of the output is one JSON object. Run from the root of
the checkout:

    python -m tests.load.equivalence
"""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tests.load.mixture import (
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
from tests.load.script import in_fresh_process, long_text, model_folder, run_script
from vllm_kvselect.config import CONFIG_KEY
from vllm_kvselect.machine import machine
from vllm_kvselect.offline.tables import console as table_console
from vllm_kvselect.tiny_model import shallow_copy

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}


@dataclass(frozen=True)
class Served:
    """What an engine gave.

    Attributes:
        answers: By `Request.key` if served alone, else by index.
        seen: Counts of steps, preemptions and so on; empty if served alone.
        counts: What else is reported.
    """

    answers: Mapping[Any, Answer]
    seen: Counter[str]
    counts: dict[str, Any]


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
        str, typer.Option(help="'ngram', or 'draft_model': the model itself; greedy requests only.")
    ] = "",
    seed: int = 0,
) -> None:
    """Counts the requests whose answers differ, and fails if there are any."""
    settings = dict(locals())
    from transformers import AutoTokenizer

    source_model = model_folder(model)
    text, source = long_text(AutoTokenizer.from_pretrained(source_model), 20_000)
    kinds = GREEDY if speculation else KINDS
    requests = draw(text, num_requests, min(num_distinct, num_requests), seed, kinds)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = shallow_copy(source_model, num_layers, Path(scratch, "model"))
        log = Path(scratch, "log")
        pool_bytes = num_blocks * _block_bytes(folder)
        arguments: dict[str, Any] = {
            "model": str(folder),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_LEN,
            "disable_log_stats": False,  # preemptions are counted there
            "additional_config": {CONFIG_KEY: SERVER},
        }
        crowded: dict[str, Any] = {
            **arguments,
            "kv_cache_memory_bytes": pool_bytes,
            "max_num_batched_tokens": 150,
            "max_num_seqs": 8,
        }
        if speculation == "draft_model":
            # Its layers are in every block.
            crowded["kv_cache_memory_bytes"] *= 2
            itself = {"method": speculation, "model": str(folder)}
            crowded["speculative_config"] = {**itself, "num_speculative_tokens": 4}
        elif speculation:
            crowded["speculative_config"] = NGRAM
        alone = {
            **arguments,
            "kv_cache_memory_bytes": 4 * pool_bytes,
            "enable_prefix_caching": False,
        }
        crowd = {"max_unfinished": max_unfinished, "preempt": preempt, "seed": seed}
        with console.status(f"{num_distinct} different requests, alone"):
            expected = in_fresh_process(log, measure, alone, requests, None)
        with console.status(f"{num_requests} requests together"):
            together = in_fresh_process(log, measure, crowded, requests, crowd)
    differences = _differences(requests, expected.answers, together.answers)
    summary = _summary(requests, expected, together, differences)
    _print_table(requests, differences, summary)
    settings |= {"model": source_model.name, "text": source}
    print(json.dumps({**summary, "settings": settings, "machine": machine()}))
    if differences:
        sys.exit(1)


def measure(
    arguments: dict[str, Any], requests: Sequence[Request], crowd: dict[str, Any] | None
) -> Served:
    """The fresh process's part: serves the requests, together as `crowd` says, or alone."""
    import vllm

    llm = vllm.LLM(**arguments)
    start = time.perf_counter()
    answers: Mapping[Any, Answer]
    seen: Counter[str] = Counter()
    if crowd is None:
        answers = serve_alone(llm, requests)
    else:
        service = serve(llm, requests, stream=True, **crowd)
        answers, seen = dict(enumerate(service.answers)), service.seen
    seconds = time.perf_counter() - start
    (counted,) = llm.collective_rpc("kv_eviction_stats")
    config = llm.llm_engine.vllm_config
    counts = {
        "seconds": round(seconds, 1),
        "num_evicted": counted["num_evicted"],
        "contexts_found": sum(
            found.value
            for found in llm.get_metrics()
            if found.name == "vllm:kv_eviction_state_hits"
        ),
        "async_scheduling": config.scheduler_config.async_scheduling,
        "num_blocks": config.cache_config.num_gpu_blocks,
        "vllm": vllm.__version__,
    }
    llm.llm_engine.engine_core.shutdown()  # else the process waits for the engine's, at its end
    return Served(answers, seen, counts)


def _block_bytes(model: Path) -> int:
    """Bytes of a block of a float32 KV cache."""
    config = json.loads((model / "config.json").read_text())
    entry_bytes = 2 * 4 * config["head_dim"]
    return config["num_hidden_layers"] * config["num_key_value_heads"] * BLOCK_SIZE * entry_bytes


def _differences(
    requests: list[Request], expected: Mapping[str, Answer], together: Mapping[int, Answer]
) -> list[tuple[Request, str]]:
    found = [
        (request, difference(request, expected[request.key], together[index]))
        for index, request in enumerate(requests)
    ]
    return [(request, text) for request, text in found if text is not None]


def _summary(
    requests: list[Request],
    expected: Served,
    together: Served,
    differences: list[tuple[Request, str]],
) -> dict[str, Any]:
    seen, counts = together.seen, together.counts
    return {
        "differences": len(differences),
        "requests": len(requests),
        "different_requests": len(expected.answers),
        "left_early": seen["left"],
        "preemptions": seen["preemptions"],
        "resets_of_everybody": seen["resets"],
        "prompts_evicted": counts["num_evicted"],
        "cached_tokens": seen["cached tokens"],
        "contexts_found": counts["contexts_found"],
        "tokens": seen["tokens"],
        "seconds_alone": expected.counts["seconds"],
        "seconds_together": counts["seconds"],
        "num_blocks": counts["num_blocks"],
        "async_scheduling": counts["async_scheduling"],
        "vllm": counts["vllm"],
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
    run_script(main)
