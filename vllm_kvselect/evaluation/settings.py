"""The one configuration of an evaluation: frozen, validated once, unknown keys are errors."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field

from vllm_kvselect.analysis.errors import EvaluationError
from vllm_kvselect.analysis.parsing import parsed, refuse_context
from vllm_kvselect.analysis.tasks import Scenario
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.evaluation.predictions import Setting

SuiteName = Literal["needles", "ruler", "longbench", "long-answers", "harness"]
SUITE_NAMES: tuple[SuiteName, ...] = get_args(SuiteName)
Through = Literal["engine", "model"]
FULL = "none"
"""The method of the full cache, which every other one is compared with."""


class EvaluationConfig(BaseModel):
    """What is asked, of which model, with which caches.

    Attributes:
        suite: Which examples.
        model: Folder or hub name of a causal language model; empty for the small model.
        tasks: Tasks of the suite; empty for all of them.
        data: Where a suite's data is, if not where it looks by itself.
        num_examples: Examples per task and length.
        questions: Questions about one text, where a task allows more than one.
        lengths: Tokens per prompt, answer included; empty for the suite's own.
        max_tokens: Tokens that an answer may have; None for what the suite says.
        seed: Decides texts and questions.
        scenarios: Whether the compressed prompt holds the question.
        methods: Methods besides the full cache, which is always measured.
        budgets: As in `EvictionConfig`.
        through: Who answers: `engine`, vLLM over HTTP, or `model`, transformers with the entries
            that the methods retain.
        url: A running server; empty to start one.
        block_size: Tokens per block, off the engine. 32 is the engine's.
        dtype: Of weights and activations; empty for the machine's fast one.
        eviction: Further fields of `EvictionConfig`, for all methods.
        out: Folder for predictions, scores, table and figures.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    suite: SuiteName
    model: str = ""
    tasks: tuple[str, ...] = ()
    data: str = ""
    num_examples: Annotated[int, Field(ge=1)] = 8
    questions: Annotated[int, Field(ge=1)] = 1
    lengths: tuple[Annotated[int, Field(ge=256)], ...] = ()
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int = 0
    scenarios: Annotated[tuple[Scenario, ...], Field(min_length=1)] = ("regular",)
    methods: tuple[str, ...] = ("adakv-perturb",)
    budgets: Annotated[tuple[int | float, ...], Field(min_length=1)] = (0.5, 0.25, 0.125)
    through: Through = "model"
    url: str = ""
    block_size: Annotated[int, Field(ge=1)] = 32
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    eviction: dict[str, Any] = {}
    out: Path = Path("evaluation")

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validates plain values.

        Args:
            values: Field names and values.

        Returns:
            The frozen configuration.

        Raises:
            EvaluationError: If a value is not accepted, or if values do not go together.
            ConfigError: If a method, a budget or one of `eviction` is not accepted.
        """
        config = parsed(cls, values)
        refuse_context(config.eviction)
        if config.suite == "harness" and config.scenarios != ("regular",):
            raise EvaluationError(
                "lm-evaluation-harness does not tell texts and questions apart; leave --scenarios "
                "out, or take another suite"
            )
        if config.suite == "harness" and config.through == "model":
            raise EvaluationError(
                "lm-evaluation-harness asks a server: add --through engine; to measure off the "
                "engine take another suite"
            )
        if config.url and config.through == "model":
            raise EvaluationError("--url names a server: add --through engine")
        config.evictions()
        return config

    def evictions(self) -> list[EvictionConfig]:
        """Every method at every budget, methods first; the full cache is not among them."""
        return [
            EvictionConfig.parse({**self.eviction, "method": method, "budget": budget})
            for method in self.methods
            for budget in self.budgets
            if method != FULL
        ]

    def settings(self, scenario: Scenario) -> list[Setting]:
        """What is measured in a scenario: the full cache, then `evictions` in their order."""
        full = Setting(scenario, FULL, None, self.through)
        others = (
            Setting(scenario, each.method, each.budget, self.through) for each in self.evictions()
        )
        return [full, *others]
