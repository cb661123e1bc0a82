"""METHODS: every method by name, a scorer and an allocator each; the one registry."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from vllm_kvselect.allocation import adaptive_pages, uniform_pages
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.pruning import needed_value_norms
from vllm_kvselect.scoring.snapkv import snapkv_scores
from vllm_kvselect.scoring.streaming_llm import streaming_llm_scores
from vllm_kvselect.scoring.value_norms import OutputProjection
from vllm_kvselect.selection import select, stage_1_mask, stage_2_keys

Scorer = Callable[[torch.Tensor, torch.Tensor, float, EvictionConfig], torch.Tensor]
"""`(query, key, scale, config)` -> scores `[num_kv_heads, num_prompt_tokens - window]`."""

Allocator = Callable[[torch.Tensor, int, int, EvictionConfig], torch.Tensor]
"""`(scores, num_packed, block_size, config)` -> pages per head `[num_kv_heads]`."""

Twins = Mapping[Callable[..., Any], Callable[..., Any]]
"""Reference functions and what a device computes in their place."""

NO_TWINS: Twins = MappingProxyType({})


@dataclass(frozen=True)
class Method:
    """A way to choose what is retained.

    Attributes:
        scorer: Importance of each entry.
        allocator: Pages of each head.
        perturbation: Whether selection has the second stage, by projected value norm.
        paper: Where the method was published.
        summary: What it retains, in one line.
    """

    scorer: Scorer
    allocator: Allocator
    perturbation: bool
    paper: str
    summary: str


METHODS: dict[str, Method] = {
    "streaming-llm": Method(
        scorer=streaming_llm_scores,
        allocator=uniform_pages,
        perturbation=False,
        paper="StreamingLLM, arXiv 2309.17453",
        summary="the first tokens and the latest ones",
    ),
    "snapkv": Method(
        scorer=snapkv_scores,
        allocator=uniform_pages,
        perturbation=False,
        paper="SnapKV, arXiv 2404.14469",
        summary="what the last prompt tokens attend to, the same number for every head",
    ),
    "snapkv-perturb": Method(
        scorer=snapkv_scores,
        allocator=uniform_pages,
        perturbation=True,
        paper="SnapKV with the selection of arXiv 2502.03805",
        summary="as snapkv, half of it by attention times projected value norm",
    ),
    "adakv": Method(
        scorer=snapkv_scores,
        allocator=adaptive_pages,
        perturbation=False,
        paper="AdaKV, arXiv 2407.11550",
        summary="what the last prompt tokens attend to, more for heads that attend widely",
    ),
    "adakv-perturb": Method(
        scorer=snapkv_scores,
        allocator=adaptive_pages,
        perturbation=True,
        paper="AdaKV with the selection of arXiv 2502.03805",
        summary="as adakv, half of it by attention times projected value norm",
    ),
}


class Retention(NamedTuple):
    """What one layer retains of one prompt, the tail blocks aside.

    Attributes:
        retained: Flat indices `head * num_tokens + token`, ascending,
            `[num_packed * num_kv_heads * block_size]` int64.
        offsets: Where each head's pages start in the run, `[num_kv_heads + 1]` int64.
    """

    retained: torch.Tensor
    offsets: torch.Tensor


def retain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output_projection: OutputProjection | None,
    scale: float,
    num_packed: int,
    block_size: int,
    config: EvictionConfig,
    twins: Twins = NO_TWINS,
) -> Retention:
    """Scores, allocates and selects: the whole choice of one layer for one prompt.

    Args:
        query: Queries of the observation window, `[window, num_heads, head_size]`.
        key: Keys of the whole prompt, `[num_kv_heads, num_prompt_tokens, head_size]`.
        value: Values of the tokens before the tail, `[num_kv_heads, num_tokens, head_size]`; only
            these compete, the tail is retained anyway.
        output_projection: The layer's W_O; None for methods without perturbation.
        scale: Softmax scale of the layer.
        num_packed: Packed blocks of the retention plan, fewer than `num_tokens / block_size`.
        block_size: Entries per page.
        config: Method and parameters.
        twins: Fast twins to call in place of the references.

    Returns:
        The retained entries and the heads' runs.
    """
    method = METHODS[config.method]

    def fast(reference: Callable[..., Any]) -> Callable[..., Any]:
        return twins.get(reference, reference)

    num_kv_heads, num_tokens, _ = value.shape
    scores = fast(method.scorer)(query, key, scale, config)[:, :num_tokens]
    pages = fast(method.allocator)(scores, num_packed, block_size, config)
    budgets, num_retained = pages * block_size, num_packed * num_kv_heads * block_size
    keys = scores
    if method.perturbation:
        assert output_projection is not None
        stage_1 = fast(stage_1_mask)(scores, budgets, config.alpha)
        norms = fast(needed_value_norms)(
            scores, value, output_projection, stage_1, budgets, config.eps
        )
        keys = stage_2_keys(scores, norms, stage_1, config.eps)
    retained = fast(select)(keys, budgets, num_retained)
    offsets = torch.zeros(num_kv_heads + 1, dtype=torch.int64, device=pages.device)
    torch.cumsum(pages, 0, out=offsets[1:])
    return Retention(retained, offsets)
