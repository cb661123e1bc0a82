"""The one configuration of an analysis: frozen, validated once, unknown keys are errors."""

from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, ConfigDict, Field

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.parsing import parsed, refuse_context
from vllm_kvselect.offline.tasks import SCENARIOS, Scenario

AnalysisName = Literal[
    "perturbation", "assumption", "bound", "alpha", "metric", "norms", "sparse-prefill"
]
ANALYSIS_NAMES: tuple[AnalysisName, ...] = get_args(AnalysisName)

PERTURB = "-perturb"
"""What the name of a method with a second stage ends with."""

PAIRS = ("snapkv", "snapkv-perturb", "adakv", "adakv-perturb")
TWO_STAGES = ("snapkv-perturb", "adakv-perturb")
BUDGETS = (0.025, 0.05, 0.1, 0.2, 0.4)


class Defaults(NamedTuple):
    """What an analysis looks at unless it is told otherwise."""

    methods: tuple[str, ...]
    budgets: tuple[int | float, ...]


DEFAULTS: dict[AnalysisName, Defaults] = {
    "perturbation": Defaults(PAIRS, BUDGETS),
    "assumption": Defaults(TWO_STAGES, BUDGETS),
    "bound": Defaults(PAIRS, BUDGETS),
    "alpha": Defaults(TWO_STAGES, (0.2,)),
    "metric": Defaults(PAIRS, (0.2,)),
    "norms": Defaults(("keydiff-perturb",), (0.2,)),
    "sparse-prefill": Defaults(("none",), (0.125,)),
}


class AnalysisConfig(BaseModel):
    """What is analysed, on which texts, and how.

    Attributes:
        analysis: Which analysis.
        model: Folder or hub name of a causal language model; empty for the small model.
        texts: `sotu`, `stdlib`, or a folder with texts.
        task: `passage` repeats the beginning of a passage of the text, the answer is its rest;
            `needle` asks for a number that is hidden in the text, `pairs` for one of many pairs of
            names, without any text.
        num_texts: Cases, each with a text of its own.
        length: Tokens per prompt, question included.
        seed: Decides texts and questions.
        scenarios: Whether the compressed prompt holds the question.
        methods: Names of the registry; empty for the analysis's own.
        budgets: As in `EvictionConfig`: fractions of the prompt or entries; empty as above.
        block_size: Tokens per block. 1 counts entries as papers do; 32 is the engine's.
        dtype: Of weights and activations.
        what_if: `equal-norms` makes all value norms equal, so that stage 2 ranks by the score
            alone. A control, which does not exist in the engine.
        eviction: Further fields of `EvictionConfig`, for all methods.
        out: Folder for the record, the table and the figures.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    analysis: AnalysisName
    model: str = ""
    texts: str = "sotu"
    task: Literal["passage", "needle", "pairs"] = "passage"
    num_texts: Annotated[int, Field(ge=1)] = 6
    length: Annotated[int, Field(ge=64)] = 1500
    seed: int = 0
    scenarios: Annotated[tuple[Scenario, ...], Field(min_length=1)] = SCENARIOS
    methods: tuple[str, ...] = ()
    budgets: tuple[int | float, ...] = ()
    block_size: Annotated[int, Field(ge=1)] = 1
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    what_if: Literal["equal-norms"] | None = None
    eviction: dict[str, Any] = {}
    out: Path = Path("analysis")

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validates plain values; the analysis's own methods and budgets stand in for none.

        Args:
            values: Field names and values.

        Returns:
            The frozen configuration.

        Raises:
            EvaluationError: If a value is not accepted.
            ConfigError: If a method, a budget or one of `eviction` is not accepted.
        """
        config = parsed(cls, values)
        refuse_context(config.eviction)
        own = DEFAULTS[config.analysis]
        config = config.model_copy(
            update={
                "methods": config.methods or own.methods,
                "budgets": config.budgets or own.budgets,
            }
        )
        if any(each.prompt_interval or each.decode_budget for each in config.evictions()):
            raise EvaluationError(
                "analyses look at one cut, at the end of a prompt: leave prompt_interval and "
                "decode_budget out"
            )
        return config

    def evictions(self) -> list[EvictionConfig]:
        """Every method at every budget, methods first."""
        return [
            EvictionConfig.parse({**self.eviction, "method": method, "budget": budget})
            for method, budget in product(self.methods, self.budgets)
        ]

    def pairs(self) -> list[tuple[str, str]]:
        """What is compared: `(method, the method it is compared with)`.

        A method with a second stage, with the same one without. One without such a partner, with
        the first of all methods.
        """
        pairs = []
        for method in self.methods:
            base = method.removesuffix(PERTURB)
            if method != base and base in self.methods:
                pairs.append((method, base))
            elif method != self.methods[0] and method + PERTURB not in self.methods:
                pairs.append((method, self.methods[0]))
        return pairs

    @property
    def headline_budget(self) -> int | float:
        """The budget that pictures of a single budget show: 20 % where it is measured."""
        return 0.2 if 0.2 in self.budgets else self.budgets[len(self.budgets) // 2]
