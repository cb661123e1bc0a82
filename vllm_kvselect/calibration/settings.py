"""The one configuration of a calibration: frozen, validated once, unknown keys are errors."""

from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from vllm_kvselect.offline.parsing import parsed

TEXTS: Final = ("prose", "code", "several-needles", "pairs")
"""Kinds of texts that a probe is made from, if no others are asked for."""

QUICK: Final = {"tokens": 2000, "length": 500, "steps": 0}
"""What `--quick` asks for, whatever else is said."""


class CalibrationConfig(BaseModel):
    """Which model is calibrated, on which texts, and how.

    Attributes:
        model: Folder or hub name of a causal language model; empty for the small model.
        texts: Kinds of texts, keys of `offline.tasks.KINDS` or folders. Each gives as many tokens.
        tokens: Tokens to make it from, about. A quarter of that comes on top, left out, to tell how
            good it is.
        length: Tokens per text.
        chunk_size: Tokens that the teacher repeats in one go.
        ridge: Penalty of large weights; see `NormalEquations.solve`.
        steps: Steps of the tuning that follows the fit; 0 for the fit alone.
        part: Tokens that the model repeats in a step.
        rate: Of Adam, in standard deviations of a feature.
        seed: Decides the texts.
        dtype: Of weights and activations; empty for `machine.default_dtype`.
        out: File to write; None for one in the user's cache, named after the model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = ""
    texts: Annotated[tuple[str, ...], Field(min_length=1)] = TEXTS
    tokens: Annotated[int, Field(ge=1)] = 48_000
    length: Annotated[int, Field(ge=256)] = 1000
    chunk_size: Annotated[int, Field(ge=1)] = 2048
    ridge: Annotated[float, Field(gt=0)] = 1e-3
    steps: Annotated[int, Field(ge=0)] = 400
    part: Annotated[int, Field(ge=1)] = 64
    rate: Annotated[float, Field(gt=0)] = 3e-3
    seed: int = 0
    dtype: Literal["", "float32", "bfloat16", "float64"] = ""
    out: Path | None = None

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validates plain values.

        Args:
            values: Field names and values.

        Returns:
            The frozen configuration.

        Raises:
            EvaluationError: If a value is not accepted.
        """
        return parsed(cls, values)

    @property
    def num_texts(self) -> int:
        """Texts of each kind to fit to."""
        return max(1, round(self.tokens / self.length / len(self.texts)))

    @property
    def num_left_out(self) -> int:
        """Texts of each kind that only tell how good the fit is."""
        return max(1, round(self.num_texts / 4))
