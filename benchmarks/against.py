"""This checkout of the plugin against another one: same prompts, by turns, in one run.

    git worktree add /tmp/before 67441db
    python benchmarks/against.py /tmp/before --prompt-len 1024

A ratio below 1 means that this checkout is faster. The last line of the output is one JSON object.
"""

import json
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from _engine import MIB, default_model, run_script
from _turns import TurnTaker
from rich.table import Table

from vllm_kvselect.config import CONFIG_KEY
from vllm_kvselect.machine import dtype_name, fast_dtype, machine
from vllm_kvselect.offline.parsing import parse_number
from vllm_kvselect.offline.tables import console

HERE = Path(__file__).resolve()


def main(
    checkout: Annotated[Path, typer.Argument(exists=True, help="Folder of the other checkout.")],
    method: Annotated[str, typer.Option(help="Of both.")] = "adakv-perturb",
    budget: Annotated[str, typer.Option(help="Entries per KV head, or a fraction.")] = "256",
    decode_budget: Annotated[int, typer.Option(min=0, help="0: no rounds.")] = 0,
    prompt_interval: Annotated[int, typer.Option(min=0, help="0: no cuts in prompts.")] = 0,
    num_prompts: Annotated[int, typer.Option(min=1, help="At once.")] = 1,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 4096,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 3,
    kv_mib: Annotated[int, typer.Option(min=1, help="KV cache of each, in MiB.")] = 512,
    pairs: Annotated[int, typer.Option(min=1, help="Turns of each, once warm.")] = 5,
    dtype: str = dtype_name(fast_dtype()),
) -> None:
    """Times both and prints how long this one takes, of what the other one takes."""
    settings = {name: str(value) for name, value in locals().items()}
    eviction = {"method": method, "budget": parse_number(budget), "decode_budget": decode_budget}
    if prompt_interval:
        eviction["prompt_interval"] = prompt_interval
    engine = {
        "model": default_model(),
        "dtype": dtype,
        "enforce_eager": True,
        "kv_cache_memory_bytes": kv_mib * MIB,
        "max_model_len": prompt_len + output_len + 1,
        "additional_config": {CONFIG_KEY: eviction},
    }
    sizes = {"num_prompts": num_prompts, "prompt_len": prompt_len, "output_len": output_len}
    job = {"engine": engine, "eviction": eviction, **sizes}
    times: dict[str, list[dict[str, float]]] = {"other": [], "this": []}
    with ExitStack() as stack:
        # One after the other: vLLM looks at the memory that is free.
        engines = {}
        for name, folder in (("other", checkout), ("this", HERE.parents[1])):
            path = {"PYTHONPATH": str(folder.resolve())}
            taker = TurnTaker(str(HERE.with_name("_timed.py")), job, path)
            engines[name] = stack.enter_context(taker)
            engines[name].turn()
        for pair in range(pairs):
            for name in times if pair % 2 else reversed(times):
                times[name].append(engines[name].turn())
    rows = {
        what: _row([(a[what], b[what]) for a, b in zip(*times.values(), strict=True)])
        for what in times["this"][0]
    }
    table = Table("", "other, s", "this, s", "ratio")
    for what, row in rows.items():
        spread = f"{row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f})"
        table.add_row(what, f"{row['other']:.3f}", f"{row['this']:.3f}", spread)
    console().print(table)
    print(json.dumps({"times": rows, "settings": settings, "machine": machine()}))


def _row(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Medians of both, and of what the pairs say."""
    ratios = [this / other for other, this in pairs]
    other, this = (statistics.median(each) for each in zip(*pairs, strict=True))
    middle = statistics.median(ratios)
    return {
        "other": other,
        "this": this,
        "ratio": middle,
        "least": min(ratios),
        "most": max(ratios),
    }


if __name__ == "__main__":
    run_script(main)
