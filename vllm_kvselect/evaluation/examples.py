"""Examples: a text, a question about it, and what counts as a right answer."""

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.tasks import Scenario

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Example:
    """One question of a suite. The prompt is token ids, so that every runner reads the same.

    Attributes:
        name: Unique in a run, such as `niah_single_1/2048/3`.
        task: The task it belongs to, a row of the tables.
        length: Length that was asked for, in tokens: examples of one task and length are averaged.
        context: The text, from the prompt's first token on.
        question: What follows it, up to where the answer begins. Empty where a suite cannot tell
            them apart.
        references: Right answers, or parts of one, as the metric wants them.
        metric: Key of `metrics.METRICS`.
        max_tokens: Tokens that an answer may have.
        stop: Texts that end an answer.
        classes: All labels of a classification task.
        target: The right answer as token ids, whose likelihood is measured; empty for none.
        unmeasured: Tokens of the target whose likelihood does not count. The first one may come
            from the full cache.
        temperature: Of the answer; 0 is greedy. Others are sampled by the engine alone.
        seed: For the sampling.
        depth: Where in the text the answer stands, 0 is its beginning and 1 its end; or None.
    """

    name: str
    task: str
    length: int
    context: TokenIds
    question: TokenIds
    references: tuple[str, ...]
    metric: str
    max_tokens: int
    stop: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    target: TokenIds = ()
    unmeasured: int = 1
    temperature: float = 0.0
    seed: int = 0
    depth: float | None = None

    @property
    def prompt(self) -> TokenIds:
        """Text and question."""
        return self.context + self.question

    def compressed(self, scenario: Scenario) -> TokenIds:
        """The part of the prompt that eviction sees in a scenario."""
        return self.prompt if scenario == "regular" else self.context


def refuse_without_questions(examples: Iterable[Example]) -> None:
    """Refuses examples that cannot be asked context-only.

    Raises:
        EvaluationError: If one does not tell its text and its question apart.
    """
    for example in examples:
        if not example.context or not example.question:
            raise EvaluationError(
                f"{example.task} does not tell text and question apart, which --scenarios "
                "context-only needs; measure it with --scenarios regular"
            )
