"""SnapKV (arXiv 2404.14469): the attention that the observation window pays to every entry."""

import torch
import torch.nn.functional as F

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scorers import Pooling, QueryGroup
from vllm_kvselect.scoring.inputs import ScoringInputs


def snapkv_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Scores every entry before the window by the window's attention to it.

    Softmax over all keys, causal inside the window; mean over the window's queries and the query
    group; the window's own columns cut off; max-pooled along the tokens (SnapKV, Listing 1, and
    Algorithm 2 of arXiv 2502.03805). Accumulates in float32, or float64 for float64 inputs.
    Options take the maximum over the group, or the mean in the pooling.

    Returns:
        `[num_kv_heads, num_tokens - window]`, at least float32.
    """
    window, num_kv_heads = inputs.query.shape[0], inputs.key.shape[0]
    rows = window_attention(inputs)
    if config.of(QueryGroup).group_reduction == "mean":
        attention = rows.mean(dim=1)
    else:
        attention = rows.view(num_kv_heads, -1, window, rows.shape[2]).mean(dim=2).amax(dim=1)
    return pool(attention[:, : inputs.num_scored], config)


def window_attention(inputs: ScoringInputs) -> torch.Tensor:
    """Attention weights of the last tokens' queries over all tokens so far.

    Query head `h` reads KV head `h // group`.

    Returns:
        `[num_kv_heads, group * num_queries, num_tokens]`: rows sum to 1, or to what the sinks leave
        of it. At least float32.
    """
    logits, sinks = window_logits(inputs), inputs.sinks
    if sinks is None:
        return torch.softmax(logits, dim=-1)
    # [num_heads] -> [num_kv_heads, group * window, 1]
    of_rows = sinks.to(logits.dtype).repeat_interleave(len(inputs.query)).view(len(logits), -1, 1)
    return torch.softmax(torch.cat((logits, of_rows), dim=-1), dim=-1)[..., :-1]


def window_logits(inputs: ScoringInputs) -> torch.Tensor:
    """What that attention is the softmax of, without sinks.

    Returns:
        `[num_kv_heads, group * num_queries, num_tokens]`, at least float32: minus infinity for what
        a query does not see, later tokens and absent entries.
    """
    query, key = inputs.query, inputs.key
    window, num_heads, head_size = query.shape
    num_kv_heads, num_tokens, _ = key.shape
    dtype = torch.promote_types(key.dtype, torch.float32)
    # [window, num_heads, head_size] -> [num_kv_heads, group * window, head_size]
    rows = query.view(window, num_kv_heads, num_heads // num_kv_heads, head_size)
    rows = rows.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_size).to(dtype)
    logits = torch.bmm(rows * inputs.scale, key.to(dtype).transpose(1, 2))
    future = torch.ones(window, window, dtype=torch.bool, device=key.device).triu(1)
    in_window = logits.view(num_kv_heads, -1, window, num_tokens)[..., -window:]
    in_window.masked_fill_(future, float("-inf"))
    if (is_absent := inputs.is_absent) is not None:
        logits.masked_fill_(is_absent[:, None], float("-inf"))
    return logits


def pool(scores: torch.Tensor, config: EvictionConfig) -> torch.Tensor:
    """Pools along the tokens as configured."""
    parameters = config.of(Pooling)
    of_neighbours = max_pool if parameters.pooling == "max" else mean_pool
    return of_neighbours(scores, parameters.kernel_size)


def max_pool(scores: torch.Tensor, kernel_size: int) -> torch.Tensor:
    """Takes the maximum over `kernel_size` neighbouring tokens, so that a phrase stays whole."""
    return F.max_pool1d(scores, kernel_size, stride=1, padding=kernel_size // 2)


def mean_pool(scores: torch.Tensor, kernel_size: int) -> torch.Tensor:
    """Takes the mean over `kernel_size` neighbouring tokens; beyond both ends are zeros."""
    return F.avg_pool1d(scores, kernel_size, stride=1, padding=kernel_size // 2)
