"""How long answers become that the model ends itself, while rounds drop entries.

A method that loses its thread may go on for longer, and its tokens per second flatter it then. The
model writes a story about each of 30 cities, sampled with the same seeds under every setting. The
last line of the output is one JSON object.
"""

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from _engine import (
    MIB,
    BenchmarkError,
    Job,
    default_model,
    engine_arguments,
    machine,
    run_child,
    run_script,
    table_console,
)
from rich.console import Console
from rich.table import Table

from vllm_kvselect.analysis.statistics import mean_and_error
from vllm_kvselect.analysis.tasks import CITIES
from vllm_kvselect.config import EvictionConfig

REQUEST = "Write a long and detailed story about a day in {city}."
BLOCK_SIZE = 32
FULL: dict[str, Any] = {"method": "full cache", "decode_budget": 0}


def main(
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    methods: Annotated[
        str, typer.Option(help="Methods, by commas.")
    ] = "snapkv,r-kv,streaming-llm,random",
    budgets: Annotated[str, typer.Option(help="Decode budgets, by commas.")] = "128",
    interval: Annotated[int, typer.Option(min=BLOCK_SIZE, help="Tokens between rounds.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Where an answer is cut off.")] = 1000,
    temperature: Annotated[float, typer.Option(help="Of the answers.")] = 0.7,
    kv_mib: Annotated[int, typer.Option(help="KV cache, with room for 32 answers.")] = 3400,
) -> None:
    """Compares lengths of answers with the full cache's, city by city."""
    settings = dict(locals())
    model = model or default_model()
    rounds = [
        {"method": method, "decode_budget": int(budget)}
        for method in methods.split(",")
        for budget in budgets.split(",")
    ]
    given = {"budget": 1.0, "decode_interval": interval}
    for asked in rounds:
        EvictionConfig.parse({**given, **asked})
    job: Job = {
        "model": model,
        "dtype": "float32",
        "enforce_eager": True,
        "kv_bytes": kv_mib * MIB,
        "max_model_len": max_tokens + 100,
        "block_size": BLOCK_SIZE,
        "eviction": {"method": "none", **given, "allow_override": ["method", "decode_budget"]},
        "rounds": rounds,
        "max_tokens": max_tokens,
        "temperature": temperature,
    }
    with Console(stderr=True).status(f"{len(rounds)} settings and the full cache"):
        found = run_child(__file__, job)
    if found["num_rounds"] == 0:
        raise BenchmarkError("no round was made; let answers be longer or budgets smaller")
    full, *others = found["answers"]
    rows = [_row(FULL, full, full)]
    rows += [_row(asked, own, full) for asked, own in zip(rounds, others, strict=True)]
    _print_table(rows)
    settings |= {"model": Path(model).name}
    print(json.dumps({"rows": rows, "settings": settings, "machine": machine()}))


def measure(job: Job) -> dict[str, Any]:
    """The child's part: all answers, as pairs of their length and whether they ended themselves."""
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_arguments(job), max_num_seqs=32)
    chats = [[{"role": "user", "content": REQUEST.format(city=city)}] for city in CITIES]
    params = [
        SamplingParams(
            max_tokens=job["max_tokens"],
            temperature=job["temperature"],
            seed=seed,
            extra_args={
                "kv_eviction": asked["method"],
                "kv_eviction_decode_budget": asked["decode_budget"],
            }
            if asked
            else None,
        )
        for asked in (None, *job["rounds"])
        for seed in range(len(CITIES))
    ]
    outputs = llm.chat(chats * (len(job["rounds"]) + 1), params, use_tqdm=False)
    found = [
        (len(output.outputs[0].token_ids), output.outputs[0].finish_reason == "stop")
        for output in outputs
    ]
    size = len(CITIES)
    answers = [found[start : start + size] for start in range(0, len(found), size)]
    counted = {metric.name: metric for metric in llm.get_metrics()}
    rounds = counted.get("vllm:kv_eviction_rounds")
    return {"answers": answers, "num_rounds": rounds.value if rounds else 0}


def _row(
    asked: dict[str, Any], found: list[tuple[int, bool]], full: list[tuple[int, bool]]
) -> dict[str, Any]:
    pairs = zip(found, full, strict=True)
    longer, error = mean_and_error([own - theirs for (own, _), (theirs, _) in pairs])
    return {
        **asked,
        "tokens": statistics.mean(length for length, _ in found),
        "ended": statistics.mean(ended for _, ended in found),
        "longer": longer,
        "error": error,
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"Answers about {len(CITIES)} cities")
    for column in ("method", "entries", "tokens", "longer than the full cache's", "ended"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        table.add_row(
            row["method"],
            str(row["decode_budget"] or "all"),
            f"{row['tokens']:.0f}",
            f"{row['longer']:+.0f} ± {row['error']:.0f}" if row["decode_budget"] else "",
            f"{row['ended']:.0%}",
        )
    table_console().print(table)


if __name__ == "__main__":
    run_script(main, measure)
