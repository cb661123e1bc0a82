"""H2O (arXiv 2306.14048): the attention that an entry has gathered from the whole prompt."""

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.snapkv import window_attention

_BLOCK_ELEMENTS = 2**22
"""Attention weights alive at once, 16 MiB in float32: memory does not grow with the prompt."""


def h2o_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    config: EvictionConfig,
    layer_index: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores every entry before the window by its accumulated attention.

    The sum over all prompt queries that see the entry, the mean over the query group.

    Args:
        query: Queries of the *whole* prompt, `[num_prompt_tokens, num_heads, head_size]`.
        key: `[num_kv_heads, num_prompt_tokens, head_size]`.
        scale: Softmax scale.
        config: Gives `window`.
        layer_index: Unused; every scorer has this signature.
        sinks: As in `window_attention`.

    Returns:
        `[num_kv_heads, num_prompt_tokens - window]`, at least float32.
    """
    return accumulate(query, key, 0, scale, sinks)[:, : key.shape[1] - config.window]


def accumulate(
    query: torch.Tensor,
    key: torch.Tensor,
    first_position: int,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention that a chunk of queries pays to every key so far.

    Additive: the sums of a prompt's chunks, each padded with zeros to the prompt's length, add up
    to those of the whole prompt. Blocked over queries, so that memory stays bounded.

    Args:
        query: Queries of the chunk, `[num_queries, num_heads, head_size]`.
        key: Keys up to the chunk's end,
            `[num_kv_heads, first_position + num_queries, head_size]`.
        first_position: Position of the chunk's first token in the prompt.
        scale: Softmax scale.
        sinks: As in `window_attention`.

    Returns:
        `[num_kv_heads, first_position + num_queries]`, at least float32: summed over the chunk's
        queries, averaged over the query group.
    """
    num_queries, num_heads, _ = query.shape
    num_kv_heads, num_keys, _ = key.shape
    dtype = torch.promote_types(key.dtype, torch.float32)
    total = torch.zeros(num_kv_heads, num_keys, dtype=dtype, device=key.device)
    step = max(1, _BLOCK_ELEMENTS // (num_heads * num_keys))
    for start in range(0, num_queries, step):
        stop = min(start + step, num_queries)
        seen = first_position + stop
        rows = window_attention(query[start:stop], key[:, :seen], scale, sinks)
        total[:, :seen] += rows.sum(dim=1)
    return total.div_(num_heads // num_kv_heads)
