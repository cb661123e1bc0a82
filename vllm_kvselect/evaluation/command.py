"""`vllm-kvselect evaluate`: benchmarks of answers from the command line."""

from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.parsing import assignment, with_options
from vllm_kvselect.registry import METHODS


@with_options(EvaluationConfig)
def evaluate(
    values: dict[str, Any],
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the method: --set alpha=0.25.")
    ] = None,
    also: Annotated[
        list[Path] | None, typer.Option(help="Predictions of others for the same examples.")
    ] = None,
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
    if values["methods"] == ["all"]:
        values["methods"] = list(METHODS)
    eviction = dict(map(assignment, setting or []))

    # Here, because they need torch, transformers and matplotlib; other commands answer without.
    try:
        from vllm_kvselect.evaluation import run
        from vllm_kvselect.offline.probes import named
    except ModuleNotFoundError as error:
        remedy = "pip install '.[eval]' in a checkout"
        raise EvaluationError(f"the evaluation needs {error.name}: {remedy}") from None

    methods = [named(each, values["model"], eviction) for each in values["methods"]]
    config = EvaluationConfig.parse(values | {"methods": methods, "eviction": eviction})
    for path in run.suite(config, also or []):
        typer.echo(path)
