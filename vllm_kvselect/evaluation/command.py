"""`vllm-kvselect evaluate`: benchmarks of answers from the command line."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vllm_kvselect.evaluation.settings import SUITE_NAMES, EvaluationConfig
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.parsing import assignment, parse_number, parts
from vllm_kvselect.registry import METHODS

_Suite = StrEnum("_Suite", [(name, name) for name in SUITE_NAMES])  # type: ignore[misc]
_DEFAULTS = EvaluationConfig(suite="needles")


def evaluate(
    suite: Annotated[_Suite, typer.Argument(help="What is asked; see docs/quality.md.")],
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    tasks: Annotated[str, typer.Option(help="Tasks by commas; by default all.")] = "",
    data: Annotated[str, typer.Option(help="Folder with the suite's data.")] = "",
    num_examples: Annotated[
        int, typer.Option(help="Examples per task and length.")
    ] = _DEFAULTS.num_examples,
    questions: Annotated[
        int, typer.Option(help="Questions about one text, where a task allows it.")
    ] = _DEFAULTS.questions,
    lengths: Annotated[
        str, typer.Option(help="Tokens per prompt, generated answer included, by commas.")
    ] = "",
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens per answer; by default the suite's.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides texts and questions.")] = _DEFAULTS.seed,
    scenarios: Annotated[str, typer.Option(help="regular, context-only, or both by a comma.")] = (
        ",".join(_DEFAULTS.scenarios)
    ),
    methods: Annotated[
        str,
        typer.Option(
            help="By commas, such as thetakv,thetakv:lam=0.0; `auto`, the best for the model; "
            "`all`; see `vllm-kvselect methods`."
        ),
    ] = ",".join(_DEFAULTS.methods),
    against: Annotated[
        str, typer.Option(help="The method that differences are to; none: the full cache.")
    ] = _DEFAULTS.against,
    budgets: Annotated[
        str, typer.Option(help="By commas: 0.25 of the prompt, or entries.")
    ] = ",".join(map(str, _DEFAULTS.budgets)),
    through: Annotated[
        str, typer.Option(help="engine: vLLM over HTTP; model: off the engine.")
    ] = _DEFAULTS.through,
    url: Annotated[str, typer.Option(help="A running server; by default one is started.")] = "",
    block_size: Annotated[
        int, typer.Option(help="Tokens per block, off the engine.")
    ] = _DEFAULTS.block_size,
    dtype: Annotated[
        str, typer.Option(help="By default the model's on a GPU, else a fast one.")
    ] = "",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Of the server that is started, such as fp8.")
    ] = _DEFAULTS.kv_cache_dtype,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the method: --set alpha=0.25.")
    ] = None,
    also: Annotated[
        list[Path] | None, typer.Option(help="Predictions of others for the same examples.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for predictions, scores, tables and pictures.")
    ] = _DEFAULTS.out,
) -> None:
    """Measure what a model still answers right after eviction.

    given-answers: known answers read along: prose, code, needles, pairs, or texts of --data.
    instructions: rules before a long text, read along as they are obeyed after it.
    own-answers: the full cache's long answers, read along under decode budgets.
    stories: how long answers become that the model ends itself.
    needles: a number hidden in prose, by depth and length. ruler: RULER's 13 tasks. longbench:
    LongBench's 16 English sets. long-answers: instructions, compared with the full cache's answers.

    A run that was interrupted goes on where it was when it is started again.
    """
    values = {name: val for name, val in locals().items() if name not in ("setting", "also")}
    for name in ("tasks", "scenarios", "methods"):
        values[name] = parts(values[name])
    if values["methods"] == ["all"]:
        values["methods"] = list(METHODS)
    for name in ("budgets", "lengths"):
        values[name] = [parse_number(each) for each in parts(values[name])]
    values["eviction"] = dict(map(assignment, setting or []))

    # Here, because they need torch, transformers and matplotlib; other commands answer without.
    try:
        from vllm_kvselect.evaluation import run
        from vllm_kvselect.offline.probes import named
    except ModuleNotFoundError as error:
        remedy = "pip install '.[eval]' in a checkout"
        raise EvaluationError(f"the evaluation needs {error.name}: {remedy}") from None

    values["methods"] = [named(each, model, values["eviction"]) for each in values["methods"]]
    config = EvaluationConfig.parse(values | {"suite": suite.value})
    for path in run.suite(config, also or []):
        typer.echo(path)
