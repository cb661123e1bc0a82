"""H2O (arXiv 2306.14048): the attention that an entry has gathered from the whole prompt."""

from dataclasses import replace

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.blocks import block_elements
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.snapkv import window_attention


def h2o_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Scores every entry before the window by its accumulated attention.

    The sum over all queries so far that see the entry, the mean over the query group. Queries are
    those of the whole prompt.

    Returns:
        `[num_kv_heads, num_tokens - window]`, at least float32.
    """
    return accumulate(inputs)[:, : inputs.key.shape[1] - config.window]


def accumulate(inputs: ScoringInputs) -> torch.Tensor:
    """Attention that queries pay to every key. Blocked over queries, so that memory stays bounded.

    Args:
        inputs: Queries, and keys from the prompt's first token to that of the last query.

    Returns:
        `[num_kv_heads, num_tokens]`, at least float32: summed over the queries, averaged over the
        query group.
    """
    num_queries, num_heads, _ = inputs.query.shape
    num_kv_heads, num_tokens, _ = inputs.key.shape
    dtype = torch.promote_types(inputs.key.dtype, torch.float32)
    total = torch.zeros(num_kv_heads, num_tokens, dtype=dtype, device=inputs.key.device)
    step = max(1, block_elements(inputs.key.device) // (num_heads * num_tokens))
    for start in range(0, num_queries, step):
        stop = min(start + step, num_queries)
        seen = inputs.num_scored + stop
        part = replace(inputs, query=inputs.query[start:stop], key=inputs.key[:, :seen])
        total[:, :seen] += window_attention(part).sum(dim=1)
    return total.div_(num_heads // num_kv_heads)
