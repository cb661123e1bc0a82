"""`vllm-kvselect calibrate`: a probe of a model from the command line."""

import time
from pathlib import Path
from typing import Annotated

import typer

from vllm_kvselect.calibration.settings import CalibrationConfig
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.parsing import parts

_DEFAULTS = CalibrationConfig()


def calibrate(
    model: Annotated[
        str, typer.Argument(help="Model folder or hub name; by default the small model.")
    ] = "",
    texts: Annotated[
        str, typer.Option(help="By commas: prose, code, needles, pairs, or folders of texts.")
    ] = ",".join(_DEFAULTS.texts),
    tokens: Annotated[int, typer.Option(help="Tokens to fit to.")] = _DEFAULTS.tokens,
    length: Annotated[int, typer.Option(help="Tokens per text.")] = _DEFAULTS.length,
    chunk_size: Annotated[
        int, typer.Option(help="Tokens that the teacher repeats in one go.")
    ] = _DEFAULTS.chunk_size,
    ridge: Annotated[float, typer.Option(help="Penalty of large weights.")] = _DEFAULTS.ridge,
    seed: Annotated[int, typer.Option(help="Decides the texts.")] = _DEFAULTS.seed,
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = _DEFAULTS.dtype,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write.", show_default="one in the cache, named by the model"),
    ] = None,
) -> None:
    """Fit a probe: what KVzip would retain, told from each token's own key and value.

    KVzip runs a model twice over a text to see what is worth keeping, whatever is asked later. The
    probe says nearly the same at almost no cost. It is fitted once per model, and the file written
    is of use with this model alone.
    """
    config = CalibrationConfig.parse({**locals(), "texts": parts(texts)})

    # Here, because they need torch and transformers; other commands answer without.
    try:
        from vllm_kvselect.calibration.calibration import calibrated
    except ModuleNotFoundError as error:
        remedy = "pip install '.[eval]' in a checkout"
        raise EvaluationError(f"the calibration needs {error.name}: {remedy}") from None

    started = time.perf_counter()
    path, facts = calibrated(config)
    quality = facts.quality
    worst, best = min(quality.correlations), max(quality.correlations)
    typer.echo(
        f"{quality.num_tokens} tokens, {time.perf_counter() - started:.0f} s; on "
        f"{quality.num_tokens_left_out} others: correlation with the teacher "
        f"{quality.correlation:.3f} ({worst:.3f} to {best:.3f} by layer), overlap of the best "
        f"quarter {quality.overlap:.0%}"
    )
    typer.echo(path)
