"""SCORERS: whatever says how important an entry is, one entry each, as plain data.

A function is named, not imported, and its parameters are declared here beside it: so the
configuration knows every scorer without loading PyTorch.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_kvselect.settings import Setting

Need = Literal["output projection", "rotation", "probe"]
"""What a method may need of a layer besides its queries, keys and values."""

ScopeName = Literal["head", "layer", "all", "pyramid", "adaptive pyramid"]
"""Keys of `scopes.SCOPES`: among which heads a budget is shared."""

NormsName = Literal["none", "two stages", "product", "bound", "defence"]
"""Keys of `norms.NORMS`: what part projected value norms have in the choice."""


class Parameters(BaseModel):
    """What some part of a method reads of the configuration, under names that no other part has."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Draw(Parameters):
    """Of `random`."""

    seed: Annotated[int, Field(ge=0, lt=2**32), Setting("Decides what `random` draws.")] = 0


class Pooling(Parameters):
    """Of whatever pools the window's attention along the tokens (SnapKV, section 4)."""

    kernel_size: Annotated[
        int,
        Field(ge=1),
        Setting("Tokens over which window methods pool their scores; an odd number."),
    ] = 7
    pooling: Annotated[
        Literal["max", "mean"], Setting("Whether they pool by the largest or by the mean.")
    ] = "max"

    @field_validator("kernel_size")
    @classmethod
    def _kernel_is_odd(cls, kernel_size: int) -> int:
        if kernel_size % 2 == 0:
            raise ValueError("the pooling kernel is centred on a token, so its width is odd")
        return kernel_size


class QueryGroup(Parameters):
    """Of the window's attention."""

    group_reduction: Annotated[
        Literal["mean", "max"],
        Setting("What window methods take of the query heads of a KV head: mean or largest."),
    ] = "mean"


class Redundancy(Parameters):
    """Of `r-kv` (arXiv 2505.24133)."""

    r_kv_lam: Annotated[
        float,
        Field(ge=0.0, le=1.0),
        Setting("How much importance weighs beside redundancy in `r-kv`."),
    ] = 0.1
    r_kv_threshold: Annotated[
        float, Field(ge=-1.0, le=1.0), Setting("Cosine above which two keys are alike to `r-kv`.")
    ] = 0.5


class Expectation(Parameters):
    """Of `expected-attention` (arXiv 2510.00636)."""

    future: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Positions after the prompt for which `expected-attention`, off the engine, expects "
            "queries."
        ),
    ] = 512
    expected_eps: Annotated[
        float,
        Field(ge=0.0, allow_inf_nan=False),
        Setting("What it adds to expected attention before it multiplies by the value's norm."),
    ] = 0.02


class ProbeFile(Parameters):
    """Of `probe`."""

    probe: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        Setting(
            "File with the model's probe, made by `vllm-kvselect calibrate`.",
            operator=True,
            option="FILE",
            otherwise="the one that fits the model, in your cache or in the package",
        ),
    ] = None


@dataclass(frozen=True)
class Scorer:
    """A way to say how important an entry is.

    Attributes:
        scores: The function in `scoring/`, such as `snapkv:snapkv_scores`.
        paper: Where it was published.
        summary: What the same number of its best entries for every head is, in one line.
        cost: What it computes for that, per layer and prompt.
        limits: What it cannot do or see.
        scopes: Among which heads a budget may be shared. The first one bears the scorer's name.
        norms: What part norms may have. Likewise.
        weights: Function whose scores norms multiply, named as `scores`; None for those of it.
        parameters: What it reads of the configuration.
        keeps_scores: Whether an entry keeps the score that it was given when it first competed, and
            no queries are looked through.
        needs: What every layer must be bound to; models may not let it be found.
        num_first: First tokens that all heads keep, unless a configuration says how many.
        whole_prompt: Whether it looks through the queries of every token of the prompt.
        replay: Whether the prompt is replayed.
        served_instead: The scorer that comes nearest among those that a server has; None if a
            server has some form of this one.
        not_in_rounds: Why it cannot choose again among retained entries while a request generates;
            empty if it can.
    """

    scores: str
    paper: str
    summary: str
    cost: str
    limits: str
    scopes: tuple[ScopeName, ...] = ("head", "layer", "all")
    norms: tuple[NormsName, ...] = ("none", "product")
    weights: str | None = None
    parameters: tuple[type[Parameters], ...] = ()
    keeps_scores: bool = False
    needs: frozenset[Need] = frozenset()
    num_first: int = 0
    whole_prompt: bool = False
    replay: bool = False
    served_instead: str | None = None
    not_in_rounds: str = ""


_WINDOW = "attention of the window"
_GUESS = "what later tokens ask for is guessed from the window"
NOT_SERVED = "no server runs it"

SCORERS: dict[str, Scorer] = {
    "streaming-llm": Scorer(
        scores="streaming_llm:streaming_llm_scores",
        paper="StreamingLLM, arXiv 2309.17453",
        summary="the first tokens and the latest ones",
        cost="nothing",
        limits="blind to the text: the middle is always dropped",
        scopes=("head",),
        norms=("none",),
        num_first=4,
    ),
    "random": Scorer(
        scores="at_random:random_scores",
        paper="a baseline, in no paper",
        summary="entries drawn evenly, others for every head and layer",
        cost="nothing",
        limits="blind to the text; for comparison only",
        scopes=("head",),
        norms=("none",),
        parameters=(Draw,),
    ),
    "h2o": Scorer(
        scores="h2o:h2o_scores",
        paper="H2O, arXiv 2306.14048",
        summary="what the whole prompt attended to",
        cost="attention of the whole prompt once more, quadratic in its length",
        limits="favours early tokens, which more queries see; off the engine only",
        scopes=("head",),
        norms=("none", "two stages"),
        whole_prompt=True,
        served_instead="snapkv",
        not_in_rounds=NOT_SERVED,
    ),
    "knorm": Scorer(
        scores="knorm:knorm_scores",
        paper="L2 norm of keys, arXiv 2406.11430",
        summary="keys of low norm, whatever is asked later; a baseline",
        cost="one pass over the keys",
        limits="blind to what is asked, and to what keys say beyond their length",
        scopes=("head",),
        norms=("none",),
    ),
    "keydiff": Scorer(
        scores="keydiff:keydiff_scores",
        paper="KeyDiff, arXiv 2504.15364",
        summary="keys that are unlike the others of their head, whatever is asked later",
        cost="one pass over the keys",
        limits="blind to what is asked; keys like the average are dropped first",
    ),
    "expected-attention": Scorer(
        scores="expected_attention:expected_attention_scores",
        weights="expected_attention:expected_weights",
        paper="Expected Attention, arXiv 2510.00636",
        summary="what queries like the prompt's will attend to, times the norm of the value",
        cost=(
            "two products of queries and keys with a matrix for each query head, linear in the "
            "prompt"
        ),
        limits="every head's queries count as one cloud; off the engine only",
        parameters=(Expectation,),
        needs=frozenset({"rotation"}),
        num_first=4,
        whole_prompt=True,
        served_instead="keydiff",
        not_in_rounds=NOT_SERVED,
    ),
    "probe": Scorer(
        scores="probe:probe_scores",
        paper="our own, after KVzip, arXiv 2505.23416, and KVzap, arXiv 2601.07891",
        summary="what it takes to repeat the prompt, told from each token's key and value",
        cost="one product of keys and values with a vector for each head",
        limits="needs a calibrated probe of the model",
        parameters=(ProbeFile,),
        keeps_scores=True,
        needs=frozenset({"rotation", "probe"}),
        num_first=4,
    ),
    "snapkv": Scorer(
        scores="snapkv:snapkv_scores",
        paper="SnapKV, arXiv 2404.14469",
        summary="what the last prompt tokens attend to, the same number for every head",
        cost=_WINDOW,
        limits=_GUESS,
        scopes=("head",),
        norms=("none", "two stages"),
        parameters=(Pooling, QueryGroup),
    ),
    "r-kv": Scorer(
        scores="r_kv:r_kv_scores",
        paper="R-KV, arXiv 2505.24133",
        summary="what the last tokens attend to, unless its key repeats others; for long answers",
        cost=f"{_WINDOW}; the product of all keys with each other",
        limits=f"{_GUESS}; quadratic in the prompt, though not in rounds",
        scopes=("head",),
        norms=("none",),
        parameters=(Pooling, Redundancy),
    ),
    "defensivekv": Scorer(
        scores="defensivekv:mean_attention",
        weights="defensivekv:defensive_scores",
        paper="DefensiveKV, arXiv 2510.13334",
        summary="what any of the last prompt tokens attends to, times projected value norm",
        cost=f"{_WINDOW}, twice",
        limits=f"{_GUESS}; a head may be left with the tail alone",
        scopes=("layer", "all"),
        norms=("defence",),
        parameters=(Pooling,),
    ),
    "kvzip": Scorer(
        scores="kvzip:replay_scores",
        paper="KVzip, arXiv 2505.23416",
        summary="what the model attends to while it repeats the prompt",
        cost="a second prefill",
        limits="off the engine only: a yardstick for the probe",
        num_first=4,
        replay=True,
        served_instead="probe",
        not_in_rounds=NOT_SERVED,
    ),
}
"""By name."""

SERVED: dict[str, tuple[str, ...]] = {
    "Take these": ("layer-probe", "layer-defensivekv", "thetakv", "layer-keydiff", "ada-probe"),
    "The papers'": (
        "snapkv",
        "snapkv-perturb",
        "adakv",
        "adakv-perturb",
        "pyramidkv",
        "pyramidkv-perturb",
        "ada-pyramidkv",
        "ada-pyramidkv-perturb",
        "defensivekv",
        "keydiff",
        "r-kv",
    ),
    "For comparison": ("knorm", "streaming-llm", "random"),
}
"""Methods that a server accepts, in groups. All others are measured off the engine only."""
