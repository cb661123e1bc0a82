"""Answers after sparse prefills, in the engine: RULER's tasks, each prompt with every setting.

All settings are asked of one engine, which lets requests choose. Segments shrink with the length as
the budget does, so that a prompt of 4,096 tokens is what one of 32,768 is with the defaults. The
last line of the output is one JSON object.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer
from _engine import (
    MIB,
    Job,
    default_model,
    engine_arguments,
    machine,
    run_child,
    run_script,
    table_console,
)
from rich.table import Table

from vllm_kvselect.analysis.models import load_tokenizer
from vllm_kvselect.config import OVERRIDE_NAMES
from vllm_kvselect.evaluation.metrics import METRICS
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.evaluation.suites.ruler import ruler
from vllm_kvselect.machine import dtype_name, fast_dtype


def main(
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    tasks: Annotated[str, typer.Option(help="RULER's.")] = "niah_single_1,niah_single_2",
    length: Annotated[int, typer.Option(help="Tokens per prompt.")] = 4096,
    num_examples: Annotated[int, typer.Option(min=1, help="Texts per task.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 14,
    only_budget: Annotated[bool, typer.Option(help="Dense, and an eighth; nothing else.")] = False,
    method: Annotated[str, typer.Option(help="What drops entries on top of it.")] = "layer-probe",
    dtype: str = dtype_name(fast_dtype()),
) -> None:
    """Asks every question with a dense prefill and with sparse ones."""
    settings = {name: str(value) for name, value in locals().items()}
    model = model or default_model()
    sparse = {"kv_prefill": "critiprefill"}
    drop = {"kv_eviction": method, "kv_eviction_budget": 0.25}
    asked: dict[str, dict[str, Any]] = {
        "dense": {},
        "an eighth is read": sparse | {"kv_prefill_budget": length // 8},
        "a sixteenth is read": sparse | {"kv_prefill_budget": length // 16},
        f"dense, {method} keeps a quarter": drop,
        "an eighth is read, and then the same": sparse | drop | {"kv_prefill_budget": length // 8},
    }
    if only_budget:
        asked = dict(list(asked.items())[:2])
    config = EvaluationConfig.parse(
        {
            "suite": "ruler",
            "tasks": tuple(tasks.split(",")),
            "lengths": (length,),
            "num_examples": num_examples,
            "max_tokens": max_tokens,
        }
    )
    examples = ruler(config, load_tokenizer(model))
    server = {
        "method": "none",
        "prefill_segment": max(64, length // 1024 * 32),
        "prefill_dense_until": length // 8,
        "allow_override": list(OVERRIDE_NAMES),
    }
    job: Job = {
        "model": model,
        "dtype": dtype,
        "enforce_eager": True,
        "kv_bytes": 512 * MIB,
        "max_model_len": length + max_tokens + 50,
        "max_tokens": max_tokens,
        "eviction": server,
        "prompts": [list(example.prompt) for example in examples],
        "settings": list(asked.values()),
    }
    answers = run_child(__file__, job)["answers"]
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, texts in zip(asked, answers, strict=True):
        for example, text in zip(examples, texts, strict=True):
            score = METRICS[example.metric](text, example.references, example.classes)
            scores[name][example.task].append(score)
    _print_table(scores)
    rows = {name: dict(by_task) for name, by_task in scores.items()}
    settings |= {"model": Path(model).name}
    typer.echo(json.dumps({"scores": rows, "settings": settings, "machine": machine()}))


def _print_table(scores: dict[str, dict[str, list[float]]]) -> None:
    table = Table(title="Answers after sparse prefills")
    tasks = list(next(iter(scores.values())))
    for column in ("setting", *tasks, "all"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    for name, by_task in scores.items():
        every = [score for task in tasks for score in by_task[task]]
        means = [sum(each) / len(each) for each in (*(by_task[task] for task in tasks), every)]
        table.add_row(name, *(f"{mean:.1%}" for mean in means))
    table_console().print(table)


def measure(job: Job) -> dict[str, Any]:
    """The child's part: answers of one engine to all prompts, setting by setting."""
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_arguments(job))
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    answers = []
    for own in job["settings"]:
        params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], extra_args=own)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([output.outputs[0].text for output in outputs])
        llm.reset_prefix_cache()
    return {"answers": answers}


if __name__ == "__main__":
    run_script(main, measure)
