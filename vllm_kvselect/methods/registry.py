"""METHODS: every method by name, made of a scorer, a ranking and an allocator."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from vllm_kvselect.allocation import pyramid_blocks
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels.base import Scorer
from vllm_kvselect.ranking import Candidates, by_bound, by_defence, by_score
from vllm_kvselect.scoring.at_random import random_scores
from vllm_kvselect.scoring.defensivekv import defensive_scores, mean_attention
from vllm_kvselect.scoring.h2o import accumulate, h2o_scores
from vllm_kvselect.scoring.snapkv import snapkv_scores
from vllm_kvselect.scoring.streaming_llm import streaming_llm_scores

Accumulator = Callable[[torch.Tensor, torch.Tensor, int, float, torch.Tensor | None], torch.Tensor]
"""`(query, key, first_position, scale, sinks)` -> what a chunk of queries adds to the scores of
keys so far, `[num_kv_heads, num_keys]`."""

Ranking = Callable[[Candidates, int, EvictionConfig], torch.Tensor]
"""`(candidates, even, config)` -> what allocation counts, of the candidates' shape."""

AllocatorName = Literal["uniform_pages", "adaptive_pages", "shared_pages"]
"""Fields of `Kernels` that allocate."""

LayerSplit = Callable[[int, int, int, EvictionConfig], list[int]]
"""`(num_packed, num_layers, num_blocks, config)` -> packed blocks per layer."""


@dataclass(frozen=True)
class Method:
    """A way to choose what is retained.

    Attributes:
        scorer: Importance of each entry.
        allocator: Pages of each head.
        paper: Where the method was published.
        summary: What it retains, in one line.
        cost: What it computes for that, per layer and prompt.
        limits: What it cannot do or see.
        ranking: What allocation counts.
        weigher: Scores that stage 2 multiplies by norms; None for those of `scorer`.
        perturbation: Whether projected value norms, and so the output projection, are needed.
        two_stages: Whether selection has a second stage, once the budgets are known.
        pooled: Whether the layers of a request share its packed pages.
        layer_split: Blocks of each layer of a pooled method; None where all heads compete.
        accumulator: How the scores add up chunk by chunk, where the scorer needs the queries of the
            whole prompt; None where those of the window are enough.
    """

    scorer: Scorer
    allocator: AllocatorName
    paper: str
    summary: str
    cost: str
    limits: str
    ranking: Ranking = by_score
    weigher: Scorer | None = None
    perturbation: bool = False
    two_stages: bool = False
    pooled: bool = False
    layer_split: LayerSplit | None = None
    accumulator: Accumulator | None = None

    @property
    def whole_prompt(self) -> bool:
        """Whether the scorer needs the queries of the whole prompt."""
        return self.accumulator is not None


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


_WINDOW = "attention of the window"
_GUESS = "what later tokens ask for is guessed from the window"

_H2O = Method(
    scorer=h2o_scores,
    allocator="uniform_pages",
    paper="H2O, arXiv 2306.14048",
    summary="what the whole prompt attended to",
    cost="attention of the whole prompt once more, quadratic in its length",
    limits="favours early tokens, which more queries see; takes nothing from the prefix cache",
    accumulator=accumulate,
)
_SNAPKV = Method(
    scorer=snapkv_scores,
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
    layer_split=pyramid_blocks,
)
_ADA_PYRAMIDKV = replace(
    _PYRAMIDKV,
    allocator="adaptive_pages",
    paper="PyramidKV, arXiv 2406.02069, with AdaKV, arXiv 2407.11550",
    summary="as pyramidkv, inside a layer as adakv",
)
_DEFENSIVEKV = Method(
    scorer=mean_attention,
    weigher=defensive_scores,
    ranking=by_defence,
    allocator="shared_pages",
    perturbation=True,
    paper="DefensiveKV, arXiv 2510.13334",
    summary="what any of the last prompt tokens attends to, times projected value norm",
    cost=f"{_WINDOW}, twice; norms of every entry",
    limits=f"{_GUESS}; a head may be left with the tail alone",
)
_THETAKV = replace(
    _SNAPKV,
    ranking=by_bound,
    allocator="adaptive_pages",
    perturbation=True,
    two_stages=True,
    paper="our own, from Theorem 2 of arXiv 2502.03805",
    summary="as adakv-perturb, but heads too share by smoothed attention times norm",
    cost=f"{_WINDOW}; norms of every entry",
)

METHODS: dict[str, Method] = {
    "streaming-llm": Method(
        scorer=streaming_llm_scores,
        allocator="uniform_pages",
        paper="StreamingLLM, arXiv 2309.17453",
        summary="the first tokens and the latest ones",
        cost="nothing",
        limits="blind to the text: the middle is always dropped",
    ),
    "random": Method(
        scorer=random_scores,
        allocator="uniform_pages",
        paper="a baseline, in no paper",
        summary="entries drawn evenly, others for every head and layer",
        cost="nothing",
        limits="blind to the text; for comparison only",
    ),
    "h2o": _H2O,
    "h2o-perturb": _perturbed(_H2O, "h2o"),
    "snapkv": _SNAPKV,
    "snapkv-perturb": _perturbed(_SNAPKV, "snapkv"),
    "adakv": _ADAKV,
    "adakv-perturb": _perturbed(_ADAKV, "adakv"),
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
