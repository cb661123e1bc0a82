"""The one configuration of an evaluation: frozen, validated once, unknown keys are errors."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field

from vllm_kvselect.config import EvictionConfig, Prefill
from vllm_kvselect.evaluation.predictions import Setting
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.parsing import parsed, refuse_context, variant
from vllm_kvselect.offline.tasks import Scenario
from vllm_kvselect.registry import AUTO, not_served
from vllm_kvselect.request import REQUEST_KEYS

SuiteName = Literal[
    "given-answers",
    "instructions",
    "own-answers",
    "stories",
    "needles",
    "ruler",
    "longbench",
    "long-answers",
]
SUITE_NAMES: tuple[SuiteName, ...] = get_args(SuiteName)
ENGINE_SUITES = ("own-answers", "stories")
"""Whose answers are sampled, and read along under decode budgets."""
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
        lengths: Tokens per prompt, with the answer where one is generated; empty for the suite's
            own.
        max_tokens: Tokens that an answer may have; None for what the suite says.
        seed: Decides texts and questions.
        scenarios: Whether the compressed prompt holds the question.
        methods: Methods besides the full cache, which is always measured; `thetakv:lam=0.0` is one
            with a field of `EvictionConfig` changed. `parse` takes names alone, no `auto`.
        against: The method that differences are to, at the same budget; the full cache by default.
        budgets: As in `EvictionConfig`.
        through: Who answers: `engine`, vLLM over HTTP; or `model`, transformers with the entries
            that the methods retain.
        url: A running server; empty to start one.
        block_size: Tokens per block, off the engine. 32 is the engine's.
        dtype: Of weights and activations; empty for `machine.default_dtype`.
        kv_cache_dtype: `--kv-cache-dtype` of the server that is started.
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
    methods: tuple[str, ...] = (AUTO,)
    against: str = FULL
    budgets: Annotated[tuple[int | float, ...], Field(min_length=1)] = (0.5, 0.25, 0.125)
    through: Through = "model"
    url: str = ""
    block_size: Annotated[int, Field(ge=1)] = 32
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    kv_cache_dtype: str = "auto"
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
        for changes in (config.eviction, *(variant(each)[1] for each in config.methods)):
            refuse_context(changes)
        if config.against not in (FULL, *config.methods):
            raise EvaluationError(
                f"--against {config.against} is not measured: add it to --methods"
            )
        if config.url and config.through != "engine":
            raise EvaluationError("--url names a server: add --through engine")
        if config.kv_cache_dtype != "auto" and (config.url or config.through != "engine"):
            raise EvaluationError(
                "--kv-cache-dtype is of a server that is started here: add --through engine, and "
                "leave --url out"
            )
        if config.suite in ENGINE_SUITES and config.through != "engine":
            raise EvaluationError(
                f"{config.suite} are for decode budgets, which are the engine's: add --through "
                "engine"
            )
        for name in config.methods if config.through == "engine" else ():
            method, changes = variant(name)
            if problem := not_served(method):
                raise EvaluationError(f"{method} {problem}")
            if unseen := changes.keys() - set(REQUEST_KEYS.values()):
                raise EvaluationError(
                    f"{name}: {', '.join(unseen)} cannot be asked of a server by a request; give "
                    "it to the server with --set"
                )
        for _, each in config._choices():
            if config.through == "model" and (
                each.of(Prefill).prefill != "dense" or each.decode_budget or each.prompt_interval
            ):
                raise EvaluationError(
                    "sparse prefills, cuts in prompts and decode budgets are the engine's: add "
                    "--through engine"
                )
        return config

    def evictions(self) -> list[EvictionConfig]:
        """Every method at every budget, methods first; the full cache is not among them."""
        return [eviction for _, eviction in self._choices()]

    def settings(self, scenario: Scenario) -> list[Setting]:
        """What is measured in a scenario: the full cache, then `evictions` in their order."""
        full = Setting(scenario, FULL, None, self.through)
        others = (
            Setting(scenario, name, each.budget if each.enabled else None, self.through)
            for name, each in self._choices()
        )
        return [full, *others]

    def _choices(self) -> list[tuple[str, EvictionConfig]]:
        """Every setting but the full cache's, and what its method is called here."""
        chosen = []
        for name in self.methods:
            if name == FULL:
                continue
            method, changes = variant(name)
            # Without eviction there is no budget, but a prefill may be sparse.
            for budget in self.budgets if method != FULL else self.budgets[:1]:
                values = {**self.eviction, "method": method, "budget": budget, **changes}
                chosen.append((name, EvictionConfig.parse(values)))
        return chosen
