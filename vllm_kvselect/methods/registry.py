"""METHODS: every method that is served, by name, as plain data: which parts it is made of.

KNOWN_METHODS has those besides that are measured off the engine only.

Parts are named, not imported, so that the configuration knows the methods without loading PyTorch.
"""

from dataclasses import dataclass, replace
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from vllm_kvselect.scoring.inputs import Scorer
    from vllm_kvselect.scoring.observer import Observer

AllocatorName = Literal["uniform_pages", "adaptive_pages", "shared_pages"]
"""Functions of `allocation.py`, fields of `Kernels`."""

Need = Literal["output projection", "rotation", "probe"]
"""What a method may need of a layer besides its queries, keys and values."""

RankingName = Literal["score", "product", "bound", "defence"]
"""Keys of `ranking.RANKINGS`."""


@dataclass(frozen=True)
class Method:
    """A way to choose what is retained.

    Attributes:
        scorer: Importance of each entry: a function in `scoring/`, such as `snapkv:snapkv_scores`.
        allocator: Pages of each head.
        paper: Where the method was published.
        summary: What it retains, in one line.
        cost: What it computes for that, per layer and prompt.
        limits: What it cannot do or see.
        ranking: What allocation counts.
        weigher: Scores that stage 2 multiplies by norms, named as `scorer`; None for those of it.
        observer: What is remembered of a prompt until it is scored: a class in `scoring/`.
        perturbation: Whether projected value norms, and so the output projection, are needed.
        rotation: Whether queries are needed as they were before their positions, and so the model's
            rotary embedding.
        probe: Whether a calibrated probe of the model is needed.
        replay: Whether the prompt is replayed, which no server does.
        sinks: Whether no head drops the first tokens: their scores are infinite, and every head
            gets a page for them at least.
        two_stages: Whether selection has a second stage, once the budgets are known.
        pooled: Whether the layers of a request share its packed pages.
        pyramid: Whether each layer of a pooled method gets a fixed part of them (PyramidKV); else
            all heads compete.
        cumulative: Whether it scores by the attention of all queries so far, not only the prompt's:
            rounds then go on adding up what its observer began, the `sums` of `AttentionSums`.
        not_in_rounds: Why it cannot choose again among retained entries while a request generates;
            empty if it can.
    """

    scorer: str
    allocator: AllocatorName
    paper: str
    summary: str
    cost: str
    limits: str
    ranking: RankingName = "score"
    weigher: str | None = None
    observer: str = "observer:WindowQueries"
    perturbation: bool = False
    rotation: bool = False
    probe: bool = False
    replay: bool = False
    sinks: bool = False
    two_stages: bool = False
    pooled: bool = False
    pyramid: bool = False
    cumulative: bool = False
    not_in_rounds: str = ""

    @property
    def in_rounds(self) -> bool:
        """Whether it can choose again while a request generates."""
        return not self.not_in_rounds

    @property
    def needs(self) -> frozenset[Need]:
        """What every layer must be bound to; models may not let it be found."""
        flags: dict[Need, bool] = {
            "output projection": self.perturbation,
            "rotation": self.rotation,
            "probe": self.probe,
        }
        return frozenset(need for need, is_needed in flags.items() if is_needed)

    @property
    def observer_class(self) -> "type[Observer]":
        """The class that `observer` names."""
        found: type[Observer] = scoring_part(self.observer)
        return found

    @property
    def whole_prompt(self) -> bool:
        """Whether every token of the prompt must be computed, none taken from the prefix cache."""
        return self.observer_class.whole_prompt


@cache
def scoring_part(name: str) -> Any:
    """What a name such as `snapkv:snapkv_scores` stands for in `scoring/`."""
    return resolve_name(f"vllm_kvselect.scoring.{name}")


def scorer_named(name: str) -> "Scorer":
    """The scorer of a name."""
    found: Scorer = scoring_part(name)
    return found


def _perturbed(method: Method, name: str) -> Method:
    """The method with a second stage of selection."""
    return replace(
        method,
        perturbation=True,
        two_stages=True,
        paper=f"{method.paper}, with the selection of arXiv 2502.03805",
        summary=f"as {name}, but half of it by attention times projected value norm",
        cost=f"{method.cost}; norms of every entry"
        if method.pooled
        else f"{method.cost}; norms of the entries that may matter",
    )


def _in_all_forms(name: str, method: Method, weights: str | None = None) -> dict[str, Method]:
    """A query-agnostic method in six forms: three scopes of the budget, each also with norms.

    One stage ranks by score times norm: without a window there is no attention whose loss stage 1
    could bound.

    Args:
        name: Of the method.
        method: With the same budget for every head.
        weights: Scorer of the forms with norms; None for the method's own.
    """
    by_head = replace(
        method,
        allocator="adaptive_pages",
        paper=f"{method.paper}, with AdaKV, arXiv 2407.11550",
        summary=f"as {name}, but heads of a layer share its budget",
    )
    pooled = replace(
        method,
        allocator="shared_pages",
        pooled=True,
        summary=f"as {name}, one budget for all layers and heads",
    )
    scopes = {name: method, f"ada-{name}": by_head, f"layer-{name}": pooled}
    forms = {}
    for scope, of_scope in scopes.items():
        forms[scope] = of_scope
        forms[f"{scope}-perturb"] = replace(
            of_scope,
            scorer=weights or method.scorer,
            ranking="product",
            perturbation=True,
            paper=f"{of_scope.paper}, with the norms of arXiv 2502.03805",
            summary=f"as {scope}, by score times projected value norm",
            cost=f"{method.cost}; a quadratic form of every value",
        )
    return forms


_WINDOW = "attention of the window"
_GUESS = "what later tokens ask for is guessed from the window"

_H2O = Method(
    scorer="h2o:h2o_scores",
    allocator="uniform_pages",
    paper="H2O, arXiv 2306.14048",
    summary="what the whole prompt attended to",
    cost="attention of the whole prompt once more, quadratic in its length",
    limits="favours early tokens, which more queries see; takes nothing from the prefix cache",
    observer="h2o:AttentionSums",
    cumulative=True,
)
_SNAPKV = Method(
    scorer="snapkv:snapkv_scores",
    allocator="uniform_pages",
    paper="SnapKV, arXiv 2404.14469",
    summary="what the last prompt tokens attend to, the same number for every head",
    cost=_WINDOW,
    limits=_GUESS,
)
_ADAKV = replace(
    _SNAPKV,
    allocator="adaptive_pages",
    paper="AdaKV, arXiv 2407.11550",
    summary="what the last prompt tokens attend to, more for heads that attend widely",
)
_PYRAMIDKV = replace(
    _SNAPKV,
    paper="PyramidKV, arXiv 2406.02069",
    summary="as snapkv, more in lower layers and less in higher ones",
    limits=f"{_GUESS}; the pyramid is the same for every prompt",
    pooled=True,
    pyramid=True,
    not_in_rounds="its pyramid is one of whole prompts",
)
_ADA_PYRAMIDKV = replace(
    _PYRAMIDKV,
    allocator="adaptive_pages",
    paper="PyramidKV, arXiv 2406.02069, with AdaKV, arXiv 2407.11550",
    summary="as pyramidkv, inside a layer as adakv",
)
_R_KV = Method(
    scorer="r_kv:r_kv_scores",
    allocator="uniform_pages",
    paper="R-KV, arXiv 2505.24133",
    summary="what the last tokens attend to, unless its key repeats others; for long answers",
    cost=f"{_WINDOW}; the product of all keys with each other",
    limits=f"{_GUESS}; quadratic in the prompt, though not in rounds",
)
_DEFENSIVEKV = Method(
    scorer="defensivekv:mean_attention",
    weigher="defensivekv:defensive_scores",
    ranking="defence",
    allocator="shared_pages",
    perturbation=True,
    paper="DefensiveKV, arXiv 2510.13334",
    summary="what any of the last prompt tokens attends to, times projected value norm",
    cost=f"{_WINDOW}, twice; norms of every entry",
    limits=f"{_GUESS}; a head may be left with the tail alone",
    not_in_rounds="it compares a token over heads that no longer hold the same tokens",
)
_THETAKV = replace(
    _SNAPKV,
    ranking="bound",
    allocator="adaptive_pages",
    perturbation=True,
    two_stages=True,
    paper="our own, from Theorem 2 of arXiv 2502.03805",
    summary="as adakv-perturb, but heads too share by smoothed attention times norm",
    cost=f"{_WINDOW}; norms of every entry",
)

_KEYDIFF = Method(
    scorer="keydiff:keydiff_scores",
    allocator="uniform_pages",
    paper="KeyDiff, arXiv 2504.15364",
    summary="keys that are unlike the others of their head, whatever is asked later",
    cost="one pass over the keys",
    limits="blind to what is asked; keys like the average are dropped first",
)
_KNORM = Method(
    scorer="knorm:knorm_scores",
    allocator="uniform_pages",
    paper="L2 norm of keys, arXiv 2406.11430",
    summary="keys of low norm, whatever is asked later; a baseline",
    cost="one pass over the keys",
    limits="blind to what is asked, and to what keys say beyond their length",
)
_EXPECTED_ATTENTION = Method(
    scorer="expected_attention:expected_attention_scores",
    allocator="uniform_pages",
    paper="Expected Attention, arXiv 2510.00636",
    summary="what queries like the prompt's will attend to, times the norm of the value",
    cost="two products of queries and keys with a matrix for each query head, linear in the prompt",
    limits="every head's queries count as one cloud; takes nothing from the prefix cache",
    observer="expected_attention:MomentsOfQueries",
    rotation=True,
    sinks=True,
    not_in_rounds="it needs the positions of retained entries, which are not kept",
)
_PROBE = Method(
    scorer="probe:probe_scores",
    allocator="uniform_pages",
    paper="our own, after KVzip, arXiv 2505.23416, and KVzap, arXiv 2601.07891",
    summary="what it takes to repeat the prompt, told from each token's query, key and value",
    cost="one product of queries, keys and values with a vector for each head",
    limits="needs a calibrated probe of the model; takes nothing from the prefix cache",
    observer="probe:ScoresOfTokens",
    rotation=True,
    probe=True,
    sinks=True,
    not_in_rounds="it scores tokens as they are computed, and the scores end with the prompt",
)
_KVZIP = Method(
    scorer="kvzip:replay_scores",
    allocator="uniform_pages",
    paper="KVzip, arXiv 2505.23416",
    summary="what the model attends to while it repeats the prompt",
    cost="a second prefill",
    limits="off the engine only: a yardstick for the probe",
    replay=True,
    sinks=True,
    not_in_rounds="no server runs it",
)

METHODS: dict[str, Method] = {
    "streaming-llm": Method(
        scorer="streaming_llm:streaming_llm_scores",
        allocator="uniform_pages",
        paper="StreamingLLM, arXiv 2309.17453",
        summary="the first tokens and the latest ones",
        cost="nothing",
        limits="blind to the text: the middle is always dropped",
    ),
    "random": Method(
        scorer="at_random:random_scores",
        allocator="uniform_pages",
        paper="a baseline, in no paper",
        summary="entries drawn evenly, others for every head and layer",
        cost="nothing",
        limits="blind to the text; for comparison only",
    ),
    "h2o": _H2O,
    "h2o-perturb": _perturbed(_H2O, "h2o"),
    "knorm": _KNORM,
    **_in_all_forms("keydiff", _KEYDIFF),
    **_in_all_forms(
        "expected-attention", _EXPECTED_ATTENTION, "expected_attention:expected_weights"
    ),
    **_in_all_forms("probe", _PROBE),
    "snapkv": _SNAPKV,
    "snapkv-perturb": _perturbed(_SNAPKV, "snapkv"),
    "adakv": _ADAKV,
    "adakv-perturb": _perturbed(_ADAKV, "adakv"),
    "r-kv": _R_KV,
    "defensivekv": _DEFENSIVEKV,
    "thetakv": _THETAKV,
    "pyramidkv": _PYRAMIDKV,
    "pyramidkv-perturb": _perturbed(_PYRAMIDKV, "pyramidkv"),
    "ada-pyramidkv": _ADA_PYRAMIDKV,
    "ada-pyramidkv-perturb": _perturbed(_ADA_PYRAMIDKV, "ada-pyramidkv"),
    "layer-defensivekv": replace(
        _DEFENSIVEKV, pooled=True, summary="as defensivekv, one budget for all layers and heads"
    ),
    "layer-thetakv": replace(
        _THETAKV, pooled=True, summary="as thetakv, one budget for all layers and heads"
    ),
}

KNOWN_METHODS: dict[str, Method] = {**METHODS, **_in_all_forms("kvzip", _KVZIP)}
"""With those that `analyze` and `evaluate` measure off the engine, and no server accepts."""
