"""Needle in a haystack of real prose: what each method loses at each budget.

Every answer token is forced during decode and its log-probability read, so the numbers are those of
the cache after the drop. The first answer token comes out of the prefill, which no method touches;
the negative log-likelihood is the mean over the tokens after it. Greedy decoding gives the answer
exactly if every forced token is the likeliest one at its step, which is how exact match is counted.
On stock vLLM both are checked in each run: against teacher forcing in the prompt, and against free
greedy decoding.
"""

import json
import random
import shlex
import statistics
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from _engine import (
    MIB,
    BenchmarkError,
    Job,
    blocks_retained,
    default_model,
    describe,
    engine_arguments,
    eviction_stats,
    machine,
    run_child,
    run_script,
    table_console,
)
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_kvselect.analysis.speeches import SPEECHES, speeches
from vllm_kvselect.analysis.tasks import needles
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.machine import dtype_name, fast_dtype

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.outputs import RequestOutput

FULL = "full"
"""Stock vLLM, without the plugin: what every method is compared with."""
UNBUDGETED = (FULL, "none")
METHODS = f"{FULL},snapkv,snapkv-perturb,adakv,adakv-perturb"
NUM_RESAMPLES = 2000

Result = dict[str, Any]


class Setting(NamedTuple):
    """One row of the table: a method and, where it takes one, a budget in entries."""

    method: str
    budget: int | None

    @property
    def eviction(self) -> dict[str, Any] | None:
        """The plugin's configuration, or None for stock."""
        if self.method == FULL:
            return None
        return {"method": self.method} | ({} if self.budget is None else {"budget": self.budget})


def main(
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    methods: Annotated[str, typer.Option(help="Separated by commas; full is stock.")] = METHODS,
    budgets: Annotated[str, typer.Option(help="Entries per KV head.")] = "128,256,512",
    prompt_len: Annotated[int, typer.Option(min=64, help="Tokens, question included.")] = 1500,
    num_prompts: Annotated[int, typer.Option(min=1)] = 50,
    seed: int = 0,
    kv_mib: Annotated[int, typer.Option(min=1, help="KV cache, in MiB.")] = 512,
    dtype: str = dtype_name(fast_dtype()),
    enforce_eager: Annotated[
        bool, typer.Option(help="Without torch.compile, which takes minutes in each process.")
    ] = True,
    markdown: Annotated[Path | None, typer.Option(help="File to write the table to.")] = None,
) -> None:
    """Measures every method at every budget on the same prompts."""
    settings = {name: value for name, value in locals().items() if value is not None}
    from transformers import AutoTokenizer

    rows = _rows(methods, budgets)
    model = model or default_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = needles(tokenizer, speeches(), num_prompts, prompt_len, seed)
    job: Job = {
        "model": model,
        "dtype": dtype,
        "enforce_eager": enforce_eager,
        "kv_bytes": kv_mib * MIB,
        "max_model_len": prompt_len + max(len(needle.answer) for needle in prompts) + 1,
        "prompts": [needle.prompt for needle in prompts],
        "answers": [needle.answer for needle in prompts],
    }
    results = _measure_all(job, rows)
    check, device = results[0][1]["check"], results[0][1]
    table = [_row(setting, result, results[0][1], prompt_len, seed) for setting, result in results]
    _print_table(table, check)
    if markdown:
        markdown.write_text(_markdown(table, check, settings, device), encoding="utf-8")
    report = {
        "rows": table,
        "check": check,
        "settings": {**settings, "model": Path(model).name, "markdown": None, "text": SPEECHES},
        "machine": {**machine(), **{key: device[key] for key in ("device", "vllm", "torch")}},
        "depths": [needle.depth for needle in prompts],
        "nll": {_name(setting): result["nll"] for setting, result in results},
    }
    print(json.dumps(report))


def _rows(methods: str, budgets: str) -> list[Setting]:
    """Every method at every budget; stock comes first, and always, as the others' reference."""
    try:
        numbers = [int(each) for each in budgets.split(",")]
    except ValueError:
        raise BenchmarkError(f"--budgets {budgets!r} are no numbers such as 128,256") from None
    names = [FULL, *(name for name in methods.split(",") if name != FULL)]
    rows = [Setting(name, None) for name in names if name in UNBUDGETED]
    rows += [Setting(name, each) for name in names if name not in UNBUDGETED for each in numbers]
    for eviction in filter(None, (setting.eviction for setting in rows)):
        EvictionConfig.parse(eviction)  # a typing error shows now and not after the first engine
    return rows


def _measure_all(job: Job, rows: list[Setting]) -> list[tuple[Setting, Result]]:
    with Console(stderr=True).status("starting") as status:
        results = []
        for number, setting in enumerate(rows, start=1):
            status.update(f"{number} of {len(rows)}: {_name(setting)}")
            results.append((setting, run_child(__file__, {**job, "eviction": setting.eviction})))
        return results


def _name(setting: Setting) -> str:
    return setting.method if setting.budget is None else f"{setting.method} {setting.budget}"


def _row(setting: Setting, result: Result, full: Result, prompt_len: int, seed: int) -> Result:
    """The statistics of one setting: intervals are 95 % bootstrap intervals over the prompts."""
    differences = [a - b for a, b in zip(result["nll"], full["nll"], strict=True)]
    return {
        "method": setting.method,
        "budget": setting.budget,
        "nll": statistics.fmean(result["nll"]),
        "nll_interval": _interval(result["nll"], seed),
        "difference": statistics.fmean(differences),
        "difference_interval": _interval(differences, seed),
        "exact_match": statistics.fmean(result["exact"]),
        "block_size": result["block_size"],
        "blocks_retained": blocks_retained(prompt_len, result["block_size"], setting.eviction),
        "blocks_prompt": ceil(prompt_len / result["block_size"]),
    }


def _interval(values: list[float], seed: int) -> tuple[float, float]:
    rng = random.Random(seed)
    means = sorted(
        statistics.fmean(rng.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES)
    )
    return means[round(0.025 * (NUM_RESAMPLES - 1))], means[round(0.975 * (NUM_RESAMPLES - 1))]


COLUMNS = (
    "method",
    "budget",
    "blocks",
    "NLL [95 %]",
    "minus full [95 %]",
    "exact match",
)


def _cells(row: Result) -> tuple[str, ...]:
    return (
        row["method"],
        "" if row["budget"] is None else str(row["budget"]),
        f"{row['blocks_retained']} of {row['blocks_prompt']} x {row['block_size']}",
        "{:.3f} [{:.3f}, {:.3f}]".format(row["nll"], *row["nll_interval"]),
        "{:+.3f} [{:+.3f}, {:+.3f}]".format(row["difference"], *row["difference_interval"])
        if row["method"] != FULL
        else "",
        f"{row['exact_match']:.0%}",
    )


def _check_line(check: Result) -> str:
    return (
        f"Check on stock: forced NLL against teacher forcing in the prompt differs by at most "
        f"{check['max_nll_difference']:.4f} per answer; greedy decoding and exact match agree on "
        f"{check['greedy_agreement']:.0%} of the prompts."
    )


def _print_table(rows: list[Result], check: Result) -> None:
    table = Table(title="Needle in a haystack: negative log-likelihood of the answer")
    for column in COLUMNS:
        table.add_column(escape(column), justify="left" if column == "method" else "right")
    for row in rows:
        table.add_row(*(escape(cell) for cell in _cells(row)))
    console = table_console()
    console.print(table)
    console.print(_check_line(check))


def _markdown(rows: list[Result], check: Result, settings: dict[str, Any], device: Result) -> str:
    """The table with the command that made it, as a page; conclusions are written elsewhere."""
    known = machine()
    lines = [
        "# Needle in a haystack: the table",
        "",
        "Written by the command below, which replaces this file.",
        "",
        f"Model {Path(settings['model']).name or 'SmolLM2-135M-Instruct'}, {settings['dtype']}; "
        f"{settings['num_prompts']} prompts of {settings['prompt_len']} tokens; prose: {SPEECHES}; "
        f"vLLM {device['vllm']}, torch {device['torch']}, {known['cpu']} ({device['device']}).",
        "",
        f"    {_command(settings)}",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + " --- |" * len(COLUMNS),
        *("| " + " | ".join(_cells(row)) + " |" for row in rows),
        "",
        "NLL: nats per answer token, on the cache after the drop; intervals: bootstrap over the "
        "prompts; *minus full*: paired, on the same prompts; *blocks*: those that hold the prompt "
        "during decode.",
        "",
        _check_line(check),
        "",
    ]
    return "\n".join(lines)


def _command(settings: dict[str, Any]) -> str:
    words = ["python", "benchmarks/quality.py"]
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value != "":
            words += [f"--{option}", str(value)]
    return shlex.join(words)


def measure(job: Job) -> Result:
    """The child's part: forces every answer on one engine; stock also checks the method."""
    from _forcing import forcing
    from vllm import LLM

    arguments, forced_parameters = forcing(engine_arguments(job))
    llm = LLM(**arguments)
    outputs = _generate(llm, job["prompts"], [forced_parameters(each) for each in job["answers"]])
    scored = [_score(*each) for each in zip(outputs, job["answers"], strict=True)]
    result = {
        "nll": [nll for nll, _ in scored],
        "exact": [exact for _, exact in scored],
        **eviction_stats(llm, job),
        **describe(llm),
    }
    if job["eviction"] is None:
        result["check"] = _check(llm, job, result)
    return result


def _generate(
    llm: "LLM", prompts: list[list[int]], params: list["SamplingParams"]
) -> list["RequestOutput"]:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def _score(output: "RequestOutput", expected: list[int]) -> tuple[float, bool]:
    """Mean negative log-likelihood after the first token, and whether greedy gives the answer."""
    completion = output.outputs[0]
    if list(completion.token_ids) != expected:
        raise RuntimeError(f"forced {expected}, got {list(completion.token_ids)}")
    steps = list(zip(completion.logprobs, expected, strict=True))
    nll = statistics.fmean(-step[token].logprob for step, token in steps[1:])
    # `>=` and not the rank: logits in bf16 may be equal, and greedy takes either.
    exact = all(
        step[token].logprob >= max(p.logprob for p in step.values()) for step, token in steps
    )
    return nll, exact


def _check(llm: "LLM", job: Job, result: Result) -> dict[str, float]:
    """Compares forcing with teacher forcing in the prompt, and exact match with free decoding."""
    from vllm import SamplingParams

    teacher = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    greedy = SamplingParams(temperature=0.0, max_tokens=len(job["answers"][0]), detokenize=False)
    pairs = list(zip(job["prompts"], job["answers"], strict=True))
    taught = _generate(llm, [[*prompt, *each] for prompt, each in pairs], [teacher] * len(pairs))
    free = _generate(llm, job["prompts"], [greedy] * len(pairs))
    differences, agreements = [], []
    for index, (prompt, expected) in enumerate(pairs):
        logprobs = taught[index].prompt_logprobs[len(prompt) + 1 :]
        steps = zip(logprobs, expected[1:], strict=True)
        nll = statistics.fmean(-step[token].logprob for step, token in steps)
        differences.append(abs(nll - result["nll"][index]))
        found = list(free[index].outputs[0].token_ids)[: len(expected)] == expected
        agreements.append(found == result["exact"][index])
    return {
        "max_nll_difference": max(differences),
        "mean_nll_difference": statistics.fmean(differences),
        "greedy_agreement": statistics.fmean(agreements),
    }


if __name__ == "__main__":
    run_script(main, measure)
