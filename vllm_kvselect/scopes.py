"""SCOPES: among which heads a budget is shared, and how, one entry each, as plain data."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from vllm_kvselect.scorers import Parameters, ScopeName
from vllm_kvselect.settings import Setting

AllocatorName = Literal["uniform_pages", "adaptive_pages", "shared_pages"]
"""Functions of `allocation.py`, fields of `Kernels`."""


class Floor(Parameters):
    """Of `adaptive_pages` (AdaKV, arXiv 2407.11550, section 4.2)."""

    safeguard: Annotated[
        float,
        Field(ge=0.0, le=1.0),
        Setting("Share of a head's even budget that `adakv`, `thetakv` and `ada-` methods spare."),
    ] = 0.2
    floor: Annotated[
        Literal["blend", "minimum"],
        Setting("How they spare it: blended with the adaptive budget (authors), or as its least."),
    ] = "blend"


class Pyramid(Parameters):
    """Of a fixed sharing over layers."""

    beta: Annotated[
        int,
        Field(ge=1),
        Setting("Steepness of `pyramidkv`: the last layer gets this part of the mean budget."),
    ] = 20


@dataclass(frozen=True)
class Scope:
    """Among which heads a budget is shared, and how.

    Attributes:
        prefix: Of the names of methods that have this scope besides another one.
        allocator: Pages of each head.
        pooled: Whether the layers of a request share its packed pages.
        is_pyramid: Whether each layer gets a fixed part of them (PyramidKV); else all heads
            compete.
        paper: Where it was published, beside the scorer's.
        summary: What changes against the scope without a prefix.
        limits: What it cannot do, beside the scorer's limits.
        parameters: What it reads of the configuration.
        not_in_rounds: As of `Scorer`.
    """

    prefix: str
    allocator: AllocatorName
    pooled: bool = False
    is_pyramid: bool = False
    paper: str = ""
    summary: str = ""
    limits: str = ""
    parameters: tuple[type[Parameters], ...] = ()
    not_in_rounds: str = ""


_OF_ADAKV = "with AdaKV, arXiv 2407.11550"
_OF_PYRAMIDS = "the pyramid is the same for every prompt"
_NO_PYRAMID = "its pyramid is one of whole prompts"

SCOPES: dict[ScopeName, Scope] = {
    "head": Scope(prefix="", allocator="uniform_pages"),
    "layer": Scope(
        prefix="ada-",
        allocator="adaptive_pages",
        paper=_OF_ADAKV,
        summary="heads of a layer share its budget",
    ),
    "all": Scope(
        prefix="layer-",
        allocator="shared_pages",
        pooled=True,
        summary="one budget for all layers and heads",
    ),
    "pyramid": Scope(
        prefix="",
        allocator="uniform_pages",
        pooled=True,
        is_pyramid=True,
        limits=_OF_PYRAMIDS,
        parameters=(Pyramid,),
        not_in_rounds=_NO_PYRAMID,
    ),
    "adaptive pyramid": Scope(
        prefix="ada-",
        allocator="adaptive_pages",
        pooled=True,
        is_pyramid=True,
        paper=_OF_ADAKV,
        summary="inside a layer as adakv",
        limits=_OF_PYRAMIDS,
        parameters=(Pyramid,),
        not_in_rounds=_NO_PYRAMID,
    ),
}
"""By name: every head the same number, heads of a layer together, heads of all layers together."""
