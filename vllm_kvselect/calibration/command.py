"""`vllm-kvselect calibrate`: a probe of a model from the command line."""

import time
from pathlib import Path
from typing import Annotated

import typer

from vllm_kvselect.calibration.settings import QUICK, CalibrationConfig
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.parsing import parts
from vllm_kvselect.offline.tasks import KINDS

_DEFAULTS = CalibrationConfig()


def calibrate(
    model: Annotated[
        str, typer.Argument(help="Model folder or hub name; by default the small model.")
    ] = "",
    texts: Annotated[
        str, typer.Option(help=f"By commas: {', '.join(KINDS)}, or folders of texts.")
    ] = ",".join(_DEFAULTS.texts),
    tokens: Annotated[int, typer.Option(help="Tokens to make it from.")] = _DEFAULTS.tokens,
    length: Annotated[int, typer.Option(help="Tokens per text.")] = _DEFAULTS.length,
    chunk_size: Annotated[
        int, typer.Option(help="Tokens that the teacher repeats in one go.")
    ] = _DEFAULTS.chunk_size,
    ridge: Annotated[float, typer.Option(help="Penalty of large weights.")] = _DEFAULTS.ridge,
    steps: Annotated[
        int, typer.Option(help="Steps of the tuning; 0 for the fit alone.")
    ] = _DEFAULTS.steps,
    part: Annotated[
        int, typer.Option(help="Tokens that the model repeats in a step.")
    ] = _DEFAULTS.part,
    rate: Annotated[float, typer.Option(help="Of the tuning's steps.")] = _DEFAULTS.rate,
    seed: Annotated[int, typer.Option(help="Decides the texts.")] = _DEFAULTS.seed,
    dtype: Annotated[
        str, typer.Option(help="By default the model's on a GPU, else a fast one.")
    ] = _DEFAULTS.dtype,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fit 2,000 tokens, tune nothing: a minute's work.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write.", show_default="one in the cache, named by the model"),
    ] = None,
) -> None:
    """Make a probe: it tells from a token's own key and value whether it is worth keeping.

    A model that can repeat a text word for word can answer whatever is asked of it later. The probe
    is fitted to what KVzip retains for that, and then tuned by gradient until the model repeats
    texts from what the probe retains. It is made once per model, and of use with this model alone.

    It says first how long it will take. When it was stopped, the same command goes on.
    """
    values = {**locals(), "texts": parts(texts)}
    if values.pop("quick"):
        values |= QUICK
    config = CalibrationConfig.parse(values)

    # Here, because they need torch and transformers; other commands answer without.
    try:
        from vllm_kvselect.calibration.calibration import calibrated
    except ModuleNotFoundError as error:
        remedy = "pip install '.[eval]' in a checkout"
        raise EvaluationError(f"the calibration needs {error.name}: {remedy}") from None

    started = time.perf_counter()
    path, facts = calibrated(config)
    quality = facts.quality
    of_budgets = zip(quality.budgets, quality.fitted, quality.tuned, strict=True)
    judged = ", ".join(
        (f"{was:.3f} -> {now:.3f}" if config.steps else f"{now:.3f}") + f" at {share:.2%}"
        for share, was, now in of_budgets
    )
    typer.echo(
        f"{quality.num_tokens} tokens, {time.perf_counter() - started:.0f} s; repeats "
        f"{quality.num_tokens_left_out} others, nats a token from the full cache: {judged}"
    )
    typer.echo(path)
