"""Which architectures are served with eviction: tiny random models in real engines, on CPU.

Each model answers a prompt of which most entries are dropped. transformers then answers on the same
entries, and the log-probabilities of the answer's tokens are compared. Rows of the table are
written as they come, so a run can be interrupted, and taken up again with `--missing`.
"""

import json
import os
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from _engine import BenchmarkError, Job, engine_arguments, run_child, run_script
from _families import FAMILIES, VOCABULARY, Family
from _reference import TOLERANCE, Check, check, largest_difference
from _verdicts import Row, Table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_kvselect.config import ConfigError, EvictionConfig

DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
BLOCK_SIZE = 32
BUDGET = 96
METHODS = ("streaming-llm", "adakv-perturb")
WITHOUT_NORMS = ("streaming-llm", "adakv")
"""For models whose values cannot be projected alone, behind a gate for one."""
PROMPT = Random(0).choices(range(2, VOCABULARY), k=300)
NUM_ANSWER_TOKENS = 8
Methods = tuple[str, str]


def main(
    only: Annotated[str, typer.Option(help="Families whose names contain this.")] = "",
    missing: Annotated[
        bool, typer.Option("--missing", help="Only families that are not in the table yet.")
    ] = False,
    document: Annotated[Path, typer.Option(help="Markdown file with the table.")] = DOCUMENT,
    timeout: Annotated[float, typer.Option(help="Seconds for each engine.")] = 300.0,
) -> None:
    """Tries families of models and writes the table; fails if an answer is wrong."""
    table = Table(document)
    chosen = [
        family
        for family in FAMILIES
        if only.lower() in family.name.lower() and not (missing and family.name in table.rows)
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    wrong = []
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(chosen))
        for family in chosen:
            progress.update(task, description=family.name)
            row = examine(family, timeout)
            table.write(row)
            progress.console.print(str(row), markup=False, soft_wrap=True)
            progress.advance(task)
            wrong += [row] if row.verdict == "WRONG" else []
    if wrong:
        sys.exit(1)


def examine(family: Family, timeout: float) -> Row:
    """Finds out whether a family is served."""
    if family.why_untried:
        return Row(family.name, "", "untried", remark=family.why_untried)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        try:
            make(family, folder)
            answers = run_child(__file__, _job(family, folder, METHODS), timeout)
            if not answers.get("refuses_method"):
                return judge(family, folder, answers, METHODS, timeout)
            others = run_child(__file__, _job(family, folder, WITHOUT_NORMS), timeout)
            row = judge(family, folder, others, WITHOUT_NORMS, timeout)
            if row.verdict == "refused":
                return row
            why = answers["refused"].partition(": ")[2]
            remark = f"{WITHOUT_NORMS[1]}, since {why}"
            return replace(row, remark="; ".join(filter(None, (row.remark, remark))))
        except BenchmarkError as error:
            return Row(family.name, "", "untried", remark=_last_line(str(error)))


def make(family: Family, folder: Path) -> None:
    """Writes a configuration and, where the family has them, random weights in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    try:
        config = AutoConfig.for_model(family.model_type, **family.config)
        if family.architecture:
            config.architectures = [family.architecture]
            config.save_pretrained(folder)
        else:
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    except Exception as error:  # of a model's own code, which may raise anything
        raise BenchmarkError(f"transformers makes no such model: {error}") from error


def judge(
    family: Family, folder: Path, answers: dict[str, Any], methods: Methods, timeout: float
) -> Row:
    """The row of a family whose engine was tried with two methods."""
    if "refused" in answers:
        return Row(family.name, answers["architecture"], "refused", remark=answers["refused"])
    if family.architecture:
        return Row(family.name, answers["architecture"], "untried", remark="it starts")
    return compare(family, folder, answers, methods, timeout)


def compare(
    family: Family, folder: Path, answers: dict[str, Any], methods: Methods, timeout: float
) -> Row:
    """Compares a served model's answers with those of transformers, or with stock vLLM's."""
    architecture = answers["architecture"]
    if answers["num_evicted"] != len(methods):
        return Row(family.name, architecture, "WRONG", remark="no entries were dropped")
    checks = [_check(folder, answers, method) for method in methods]
    cells = (checks[0].cell, checks[1].cell)
    if any(check.is_wrong for check in checks):
        return Row(family.name, architecture, "WRONG", cells)
    if any(check.is_shown for check in checks):
        return Row(family.name, architecture, "served", cells)
    stock = run_child(__file__, _job(family, folder, None), timeout)
    apart = largest_difference(stock["whole"]["logprobs"], answers["whole"]["logprobs"])
    same = stock["whole"]["token_ids"] == answers["whole"]["token_ids"] and apart < TOLERANCE
    remark = f"{apart:.0e} from stock with a budget above the prompt; {checks[0].reason}"
    return Row(family.name, architecture, "served" if same else "WRONG", cells, remark)


def _check(folder: Path, answers: dict[str, Any], method: str) -> Check:
    config = EvictionConfig.parse({"method": method, "budget": BUDGET})
    return check(folder, PROMPT, answers[method], answers["whole"], BLOCK_SIZE, config)


def _job(family: Family, folder: Path, methods: Methods | None) -> Job:
    settings = {method: {"kv_eviction": method} for method in methods or ()}
    whole = {"whole": {"kv_eviction_budget": 2 * len(PROMPT)}}
    eviction: dict[str, Any] | None = None
    if methods:
        eviction = {"method": methods[1], "budget": BUDGET, "allow_override": ["method", "budget"]}
    return {
        "model": str(folder),
        "dtype": family.dtype,
        "enforce_eager": True,
        "kv_bytes": 64 << 20,
        "max_model_len": 1024 if not family.architecture else None,
        "block_size": BLOCK_SIZE,
        "eviction": eviction,
        "requests": {**whole, **settings} if eviction else {"whole": None},
        "engine": {
            "skip_tokenizer_init": True,
            "load_format": "dummy" if family.architecture else "auto",
            **family.engine,
        },
    }


def measure(job: Job) -> dict[str, Any]:
    """The child's part: one engine, one answer for each request, one after the other."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that errors arrive as they are
    from vllm import LLM, SamplingParams

    try:
        llm = LLM(**engine_arguments(job), **job["engine"])
    except Exception as error:
        reason = str(_own_error(error))
        return {
            "refused": _refusal(reason, job["model"]),
            "refuses_method": "; choose one of " in reason,
            "architecture": _architecture(job),
        }
    answers: dict[str, Any] = {"architecture": _architecture(job)}
    for name, settings in job["requests"].items():
        params = SamplingParams(
            temperature=0.0,
            max_tokens=NUM_ANSWER_TOKENS,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            extra_args=settings,
        )
        (result,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        (output,) = result.outputs
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        answers[name] = {
            "token_ids": list(output.token_ids),
            "logprobs": [entries[token].logprob for token, entries in pairs],
        }
    if job["eviction"] is not None:
        (counted,) = llm.collective_rpc("kv_eviction_stats")
        answers["num_evicted"] = counted["num_evicted"]
    return answers


def _architecture(job: Job) -> str:
    config = json.loads(Path(job["model"], "config.json").read_text(encoding="utf-8"))
    return str(config["architectures"][0])


def _own_error(error: BaseException | None) -> ConfigError:
    """What we have against a model; other people's errors are raised again."""
    raised = error
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__ or error.__context__
    if error is None:
        assert raised is not None
        raise raised
    return error


def _refusal(reason: str, model: str) -> str:
    """The reason in one line, without what to do."""
    reason = reason.removeprefix("kv_eviction cannot be used here: ").replace(repr(model), "")
    reason = " ".join(reason.split()).removeprefix("model ")
    return re.split("; (?:serve|choose) ", reason)[0]


def _last_line(text: str) -> str:
    """What an error says at its end: one sentence, pydantic's pointers aside."""
    lines = [line for line in text.strip().splitlines() if "errors.pydantic.dev" not in line]
    return re.split(r"\. | \[type=", lines[-1])[0].strip() if lines else "no message"


if __name__ == "__main__":
    run_script(main, measure)
