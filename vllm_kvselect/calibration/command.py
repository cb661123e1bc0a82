"""`vllm-kvselect calibrate`: a probe of a model from the command line."""

import time
from typing import Annotated, Any

import typer

from vllm_kvselect.calibration.settings import QUICK, CalibrationConfig
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.parsing import with_options


@with_options(CalibrationConfig)
def calibrate(
    values: dict[str, Any],
    quick: Annotated[
        bool, typer.Option("--quick", help="Fit 2,500 tokens, tune nothing: a minute's work.")
    ] = False,
) -> None:
    """Make a probe: it tells from a token's own key and value whether it is worth keeping.

    A model that can repeat a text word for word can answer whatever is asked of it later. The probe
    is fitted to what KVzip retains for that, and then tuned by gradient until the model repeats
    texts from what the probe retains. It is made once per model, and of use with this model alone.

    It says first how long it will take. When it was stopped, the same command goes on.
    """
    config = CalibrationConfig.parse(values | (QUICK if quick else {}))

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
