"""DefensiveKV (arXiv 2510.13334): the worst case of the window's attention instead of its mean."""

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scorers import Pooling
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.snapkv import max_pool, mean_pool, window_attention


def defensive_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Scores every entry before the window by the most attention that any row pays to it.

    The maximum over the query group and the window's queries, pooled along the tokens, then raised
    to its own mean over the tokens where it lies below (the authors' defensive aggregation).
    With `pooling` `mean` each row is pooled and rescaled to its mass first, as in their code.

    Returns:
        `[num_kv_heads, num_tokens - window]`, at least float32.
    """
    rows = window_attention(inputs)[..., : inputs.num_scored]
    pooling = config.of(Pooling)
    if pooling.pooling == "max":
        worst = max_pool(rows.amax(dim=1), pooling.kernel_size)
    else:
        pooled = mean_pool(rows, pooling.kernel_size)
        total = pooled.sum(dim=-1, keepdim=True).clamp_(min=torch.finfo(pooled.dtype).tiny)
        worst = (pooled * (rows.sum(dim=-1, keepdim=True) / total)).amax(dim=1)
    if (is_absent := inputs.is_absent) is None:
        return torch.maximum(worst, worst.mean(dim=-1, keepdim=True))
    is_absent = is_absent[:, : inputs.num_scored]
    total = worst.masked_fill(is_absent, 0).sum(dim=-1, keepdim=True)
    return torch.maximum(worst, total / (~is_absent).sum(dim=-1, keepdim=True))


def mean_attention(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Mean attention of the window and the query group, not pooled: what stage 1 sums up.

    Returns:
        `[num_kv_heads, num_tokens - window]`: a row, the window's share and that of
        the sinks sum to 1.
    """
    return window_attention(inputs).mean(dim=1)[:, : inputs.num_scored]
