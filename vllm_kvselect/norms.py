"""NORMS: what part projected value norms have in a choice, one entry each, as plain data."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from vllm_kvselect.scopes import AllocatorName
from vllm_kvselect.scorers import NOT_SERVED, NormsName, Parameters
from vllm_kvselect.settings import Setting

RankingName = Literal["score", "product", "bound", "defence"]
"""Keys of `ranking.RANKINGS`."""


class FirstStage(Parameters):
    """Of a selection with two stages (Algorithm 1 of arXiv 2502.03805)."""

    alpha: Annotated[
        float,
        Field(ge=0.0, le=1.0),
        Setting(
            "Share of a head's budget that `-perturb` methods and `thetakv` fill by score alone.",
            option="SHARE",
        ),
    ] = 0.5


class SecondStage(Parameters):
    """Of a second stage that multiplies scores by norms."""

    eps: Annotated[
        float,
        Field(ge=0.0, allow_inf_nan=False),
        Setting("What `-perturb` methods add to a score before they multiply it by the norm."),
    ] = 1e-4


class Weights(Parameters):
    """Of whatever may multiply other scores by norms than those of stage 1."""

    stage_2_scores: Annotated[
        Literal["pooled", "unpooled"],
        Setting("Which scores of window methods are multiplied by norms."),
    ] = "pooled"


class Smoothing(Parameters):
    """Of the ranking by a bound (ThetaKV)."""

    lam: Annotated[
        float,
        Field(ge=0.0, allow_inf_nan=False),
        Setting("How much attention is smoothed by `thetakv`: weight of the prior in windows."),
    ] = 1.0


class Mass(Parameters):
    """Of the ranking of DefensiveKV."""

    mass: Annotated[
        float,
        Field(ge=0.0, le=1.0),
        Setting("Share of a head's attention that stage 1 of `defensivekv` takes."),
    ] = 0.9


@dataclass(frozen=True)
class Norms:
    """What part projected value norms have in the choice.

    Attributes:
        suffix: Of the names of methods that use norms so besides doing without.
        ranking: What allocation counts.
        two_stages: Whether selection has a second stage, once the budgets are known.
        allocator: Pages of each head where they are shared; None for what the scope says.
        paper: Where it was published, beside the scorer's.
        summary: What changes against the method without a suffix, which is `{}`.
        cost: What it computes, beside the scorer's cost.
        parameters: What it reads of the configuration.
        not_in_rounds: As of `Scorer`.
    """

    suffix: str
    ranking: RankingName
    two_stages: bool = False
    allocator: AllocatorName | None = None
    paper: str = ""
    summary: str = ""
    cost: str = ""
    parameters: tuple[type[Parameters], ...] = ()
    not_in_rounds: str = ""


EVERY_NORM = "norms of every entry"
"""Their cost, where none can be left out."""

NORMS: dict[NormsName, Norms] = {
    "none": Norms(suffix="", ranking="score"),
    "two stages": Norms(
        suffix="-perturb",
        ranking="score",
        two_stages=True,
        paper="with the selection of arXiv 2502.03805",
        summary="as {}, but half of it by attention times projected value norm",
        cost="norms of the entries that may matter",
        parameters=(FirstStage, SecondStage, Weights),
    ),
    # One stage: without a window there is no attention whose loss stage 1 could bound.
    "product": Norms(
        suffix="-perturb",
        ranking="product",
        paper="with the norms of arXiv 2502.03805",
        summary="as {}, by score times projected value norm",
        cost="a quadratic form of every value",
        not_in_rounds=NOT_SERVED,
    ),
    "bound": Norms(
        suffix="",
        ranking="bound",
        two_stages=True,
        allocator="adaptive_pages",
        cost=EVERY_NORM,
        parameters=(Smoothing, FirstStage, Weights),
    ),
    "defence": Norms(
        suffix="",
        ranking="defence",
        allocator="shared_pages",
        cost=EVERY_NORM,
        parameters=(Mass, Weights),
        not_in_rounds="it compares a token over heads that no longer hold the same tokens",
    ),
}
"""By name."""
