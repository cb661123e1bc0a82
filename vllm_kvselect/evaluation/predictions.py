"""Predictions: what was answered, one line of JSON each, so that a run can be taken up again."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.tasks import Scenario

Budget = int | float
"""Entries per KV head, or a fraction of the prompt; as in `EvictionConfig`."""


@dataclass(frozen=True)
class Prediction:
    """An answer to an example.

    Attributes:
        example: Name of the example.
        scenario: Whether the question was part of what was compressed.
        method: The method; `none` for the full cache. Others' may stand here too.
        budget: Its budget, None for the full cache.
        through: Who answered: `engine`, `model`, or a peer.
        text: The answer.
        num_tokens: Its length.
        retained: Entries retained over the entries of the compressed part, 1.0 for all.
        nll: Negative log-likelihood of the right answer in nats per token, without its first
            token; None where it was not measured.
        accuracy: Share of those tokens that are the likeliest ones, or None.
    """

    example: str
    scenario: Scenario
    method: str
    budget: Budget | None
    through: str
    text: str
    num_tokens: int
    retained: float
    nll: float | None = None
    accuracy: float | None = None

    @property
    def setting(self) -> "Setting":
        """What it is averaged with."""
        return Setting(self.scenario, self.method, self.budget, self.through)


@dataclass(frozen=True)
class Setting:
    """What a number belongs to; fields as in `Prediction`."""

    scenario: Scenario
    method: str
    budget: Budget | None
    through: str


def write(predictions: Iterable[Prediction], path: Path) -> None:
    """Appends predictions to a file."""
    with path.open("a", encoding="utf-8") as file:
        for prediction in predictions:
            file.write(json.dumps(asdict(prediction), ensure_ascii=False) + "\n")


def read(path: Path) -> Iterator[Prediction]:
    """Reads the predictions of a file; of one that does not exist, none.

    Raises:
        EvaluationError: If a line is none.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield Prediction(**json.loads(line))
            except (TypeError, ValueError) as error:
                raise EvaluationError(f"{path}, line {number}: {error}") from None
