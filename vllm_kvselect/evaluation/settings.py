"""The one configuration of an evaluation: frozen, validated once, unknown keys are errors."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field
from typer import Argument, Option

from vllm_kvselect.config import EvictionConfig, Prefill
from vllm_kvselect.evaluation.predictions import Setting
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.parsing import Settings, refuse_context, variant
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
ENGINE_SUITES = ("own-answers", "stories")
"""Whose answers are sampled, and read along under decode budgets."""
Through = Literal["engine", "model"]
FULL = "none"
"""The method of the full cache, which every other one is compared with."""


class EvaluationConfig(Settings):
    """What is asked, of which model, with which caches; each field is an option of the command.

    `methods` are besides the full cache, which is always measured; `parse` takes names alone, no
    `auto`. `eviction` has further fields of `EvictionConfig`, for all methods.
    """

    suite: Annotated[SuiteName, Argument(help="What is asked; see docs/quality.md.")]
    model: Annotated[
        str, Option(help="Folder or hub name of a model; by default the small model.")
    ] = ""
    tasks: Annotated[tuple[str, ...], Option(help="Tasks by commas; by default all.")] = ()
    data: Annotated[
        str, Option(help="Folder with the suite's data, if not where it looks by itself.")
    ] = ""
    num_examples: Annotated[int, Field(ge=1), Option(help="Examples per task and length.")] = 8
    questions: Annotated[
        int, Field(ge=1), Option(help="Questions about one text, where a task allows it.")
    ] = 1
    lengths: Annotated[
        tuple[Annotated[int, Field(ge=256)], ...],
        Option(
            help="Tokens per prompt, generated answer included, by commas; by default the suite's."
        ),
    ] = ()
    max_tokens: Annotated[
        int | None, Field(ge=1), Option(help="Tokens per answer; by default the suite's.")
    ] = None
    seed: Annotated[int, Option(help="Decides texts and questions.")] = 0
    scenarios: Annotated[
        tuple[Scenario, ...],
        Field(min_length=1),
        Option(help="regular, context-only, or both by a comma."),
    ] = ("regular",)
    methods: Annotated[
        tuple[str, ...],
        Option(
            help="By commas, such as thetakv,thetakv:lam=0.0; `auto`, the best for the model; "
            "`all`; see `vllm-kvselect methods`."
        ),
    ] = (AUTO,)
    against: Annotated[
        str,
        Option(
            help="The method that differences are to, at the same budget; none: the full cache."
        ),
    ] = FULL
    budgets: Annotated[
        tuple[int | float, ...],
        Field(min_length=1),
        Option(help="By commas: 0.25 of the prompt, or entries."),
    ] = (0.5, 0.25, 0.125)
    through: Annotated[Through, Option(help="engine: vLLM over HTTP; model: off the engine.")] = (
        "model"
    )
    url: Annotated[str, Option(help="A running server; by default one is started.")] = ""
    block_size: Annotated[
        int, Field(ge=1), Option(help="Tokens per block, off the engine; 32 is the engine's.")
    ] = 32
    dtype: Annotated[
        Literal["", "float32", "bfloat16", "float16"],
        Option(help="By default the model's on a GPU, else a fast one."),
    ] = ""
    kv_cache_dtype: Annotated[str, Option(help="Of the server that is started, such as fp8.")] = (
        "auto"
    )
    eviction: dict[str, Any] = Field(default_factory=dict)
    out: Annotated[Path, Option(help="Folder for predictions, scores, tables and pictures.")] = (
        Path("evaluation")
    )

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """As of `Settings`.

        Raises:
            EvaluationError: If a value is not accepted, or if values do not go together.
            ConfigError: If a method, a budget or one of `eviction` is not accepted.
        """
        config = super().parse(values)
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
