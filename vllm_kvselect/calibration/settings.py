"""The one configuration of a calibration: frozen, validated once, unknown keys are errors."""

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field
from typer import Argument, Option

from vllm_kvselect.offline.parsing import Settings
from vllm_kvselect.offline.tasks import KINDS

TEXTS: Final = ("prose", "code", "records", "several-needles", "pairs")
"""Kinds of texts that a probe is made from, if no others are asked for."""

QUICK: Final = {"tokens": 2500, "length": 500, "steps": 0}
"""What `--quick` asks for, whatever else is said."""


class CalibrationConfig(Settings):
    """Which model is calibrated, on which texts, and how; each field is an option of the command.

    A quarter of `tokens` comes on top, left out, to tell how good the probe is. `ridge` is that of
    `NormalEquations.solve`, `rate` that of Adam, in standard deviations of a feature.
    """

    model: Annotated[
        str, Argument(help="Model folder or hub name; by default the small model.")
    ] = ""
    texts: Annotated[
        tuple[str, ...],
        Field(min_length=1),
        Option(help=f"By commas: {', '.join(KINDS)}, or folders; of each as many tokens."),
    ] = TEXTS
    tokens: Annotated[int, Field(ge=1), Option(help="Tokens to make it from, about.")] = 48_000
    length: Annotated[int, Field(ge=256), Option(help="Tokens per text.")] = 1000
    chunk_size: Annotated[
        int, Field(ge=1), Option(help="Tokens that the teacher repeats in one go.")
    ] = 2048
    ridge: Annotated[float, Field(gt=0), Option(help="Penalty of large weights.")] = 1e-3
    steps: Annotated[int, Field(ge=0), Option(help="Steps of the tuning; 0 for the fit alone.")] = (
        400
    )
    part: Annotated[int, Field(ge=1), Option(help="Tokens that the model repeats in a step.")] = 64
    rate: Annotated[float, Field(gt=0), Option(help="Of the tuning's steps.")] = 3e-3
    seed: Annotated[int, Option(help="Decides the texts.")] = 0
    dtype: Annotated[
        Literal["", "float32", "bfloat16", "float64"],
        Option(help="By default the model's on a GPU, else a fast one."),
    ] = ""
    out: Annotated[
        Path | None,
        Option(help="File to write.", show_default="one in the cache, named by the model"),
    ] = None

    @property
    def num_texts(self) -> int:
        """Texts of each kind to fit to."""
        return max(1, round(self.tokens / self.length / len(self.texts)))

    @property
    def num_left_out(self) -> int:
        """Texts of each kind that only tell how good the fit is."""
        return max(1, round(self.num_texts / 4))
