"""DefensiveKV (arXiv 2510.13334): the worst case of the window's attention instead of its mean."""

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.snapkv import max_pool, mean_pool, window_attention


def defensive_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    config: EvictionConfig,
    layer_index: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores every entry before the window by the most attention that any row pays to it.

    The maximum over the query group and the window's queries, pooled along the tokens, then raised
    to its own mean over the tokens where it lies below (the authors' defensive aggregation).
    With `pooling` `mean` each row is pooled and rescaled to its mass first, as in their code.

    Args:
        query: Queries of the last `window` prompt tokens, `[window, num_heads, head_size]`.
        key: All keys of the prompt, `[num_kv_heads, num_prompt_tokens, head_size]`.
        scale: Softmax scale, as the layer uses it.
        config: Gives `pooling` and `kernel_size`.
        layer_index: Unused; every scorer has this signature.
        sinks: As in `window_attention`.

    Returns:
        `[num_kv_heads, num_prompt_tokens - window]`, at least float32.
    """
    rows = window_attention(query, key, scale, sinks)[..., : key.shape[1] - query.shape[0]]
    if config.pooling == "max":
        worst = max_pool(rows.amax(dim=1), config.kernel_size)
    else:
        pooled = mean_pool(rows, config.kernel_size)
        total = pooled.sum(dim=-1, keepdim=True).clamp_(min=torch.finfo(pooled.dtype).tiny)
        worst = (pooled * (rows.sum(dim=-1, keepdim=True) / total)).amax(dim=1)
    return torch.maximum(worst, worst.mean(dim=-1, keepdim=True))


def mean_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    config: EvictionConfig,
    layer_index: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean attention of the window and the query group, not pooled: what stage 1 sums up.

    Args:
        query: `[window, num_heads, head_size]`.
        key: `[num_kv_heads, num_prompt_tokens, head_size]`.
        scale: Softmax scale.
        config: Unused.
        layer_index: Unused.
        sinks: As in `window_attention`.

    Returns:
        `[num_kv_heads, num_prompt_tokens - window]`: a row, the window's share and that of
        the sinks sum to 1.
    """
    rows = window_attention(query, key, scale, sinks)
    return rows.mean(dim=1)[:, : key.shape[1] - query.shape[0]]
