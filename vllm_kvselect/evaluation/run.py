"""The walk of an evaluation: examples, predictions, scores."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvselect.evaluation import off_engine, report, served
from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.predictions import read, write
from vllm_kvselect.evaluation.scores import scored
from vllm_kvselect.evaluation.settings import EvaluationConfig, SuiteName
from vllm_kvselect.evaluation.suites.given_answers import given_answers
from vllm_kvselect.evaluation.suites.instructions import instructions
from vllm_kvselect.evaluation.suites.long_answers import long_answers
from vllm_kvselect.evaluation.suites.longbench import longbench
from vllm_kvselect.evaluation.suites.needles import needles
from vllm_kvselect.evaluation.suites.own_answers import own_answers
from vllm_kvselect.evaluation.suites.ruler import ruler
from vllm_kvselect.evaluation.suites.stories import stories
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.models import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Suite = Callable[[EvaluationConfig, PreTrainedTokenizerBase], list[Example]]

SUITES: "dict[SuiteName, Suite]" = {
    "given-answers": given_answers,
    "instructions": instructions,
    "own-answers": own_answers,
    "stories": stories,
    "needles": needles,
    "ruler": ruler,
    "longbench": longbench,
    "long-answers": long_answers,
}
RUNNERS = {"engine": served.answer, "model": off_engine.answer}


def suite(config: EvaluationConfig, also: Sequence[Path] = ()) -> list[Path]:
    """Answers what is not answered yet, scores all of it, and reports, in files that it names.

    `also` are files with further predictions for the same examples.

    Raises:
        EvaluationError: If something is missing, or the folder holds another evaluation.
    """
    for file in also:
        if not file.is_file():
            raise EvaluationError(f"--also {file}: there is no such file")
    started = time.perf_counter()
    examples = SUITES[config.suite](config, load_tokenizer(config.model))
    _claim(config, examples)
    path = config.out / "predictions.jsonl"
    done = {(each.example, each.setting) for each in read(path)}
    for predictions in RUNNERS[config.through](config, examples, done):
        write(predictions, path)
    # The folder may hold answers in settings that were asked for another time.
    asked = {each for scenario in config.scenarios for each in config.settings(scenario)}
    own = [each for each in read(path) if each.setting in asked]
    everybody = [*(each for file in also for each in read(file)), *own]
    frame = scored(examples, everybody, config.against)
    paths = report.write(frame, config, time.perf_counter() - started)
    report.show(frame)
    return paths


def _claim(config: EvaluationConfig, examples: Sequence[Example]) -> None:
    """Makes the folder that of this evaluation: what is answered there is taken up again."""
    config.out.mkdir(parents=True, exist_ok=True)
    fixed = config.model_dump(
        mode="json", include={"suite", "model", "data", "dtype", "eviction", "seed"}
    )
    if config.kv_cache_dtype != "auto":
        fixed["kv_cache_dtype"] = config.kv_cache_dtype
    lines = [json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in examples]
    for name, text in (("run.json", json.dumps(fixed) + "\n"), ("examples.jsonl", "".join(lines))):
        path = config.out / name
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise EvaluationError(
                f"{path} is of another evaluation; choose another folder with --out, or remove it"
            )
        path.write_text(text, encoding="utf-8")
