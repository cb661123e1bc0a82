"""R-KV (arXiv 2505.24133): what the window attends to, unless its key repeats those of others."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scorers import Redundancy
from vllm_kvselect.scoring.blocks import block_elements
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.snapkv import pool, window_logits


def similarities(inputs: ScoringInputs, threshold: float) -> torch.Tensor:
    """The sum of each key's cosines with the other keys of its head.

    For every key, the latest one of those that are like it, with a cosine above `threshold`, does
    not count as like it: so the latest of many repetitions is left. Blocked over keys, so that
    memory stays bounded. Keys are all so far, those of the window included.

    Returns:
        `[num_kv_heads, num_tokens]`, at least float32; 0 for absent entries.
    """
    key = inputs.key.to(torch.promote_types(inputs.key.dtype, torch.float32))
    directions, is_absent = F.normalize(key, dim=-1), inputs.is_absent
    num_kv_heads, num_tokens, _ = key.shape
    if is_absent is not None:
        directions = directions.masked_fill(is_absent[..., None], 0)
    columns = torch.arange(num_tokens, dtype=torch.int32, device=key.device)
    total = key.new_zeros(num_kv_heads, num_tokens)
    step = max(1, block_elements(key.device) // total.numel())
    for start in range(0, num_tokens, step):
        rows = directions[:, start : start + step]
        cosines = torch.bmm(rows, directions.transpose(1, 2))
        cosines[..., start : start + step].diagonal(dim1=1, dim2=2).zero_()
        # -1, no column, where no other key is alike.
        latest = torch.where(cosines > threshold, columns, -1).amax(dim=-1, keepdim=True)
        place = latest.clamp(min=0).long()
        cosines.scatter_(-1, place, cosines.gather(-1, place).masked_fill_(latest >= 0, 0))
        total += cosines.sum(dim=1)
    return total


def r_kv_scores(
    inputs: ScoringInputs,
    config: EvictionConfig,
    similarities: Callable[[ScoringInputs, float], torch.Tensor] = similarities,
) -> torch.Tensor:
    """Scores every entry before the window by importance `I` and redundancy `R`.

    The paper's `Z = lam * I - (1 - lam) * R`, lifted by a constant of the head that makes it
    nowhere negative. `similarities` is the function above, or a twin: it is nearly all of the work.

    Returns:
        `[num_kv_heads, num_tokens - window]`, at least float32.
    """
    parameters, num_scored = config.of(Redundancy), inputs.num_scored
    lam = parameters.r_kv_lam
    repeated = redundancy(similarities(inputs, parameters.r_kv_threshold), inputs)
    alone = repeated.amax(dim=-1, keepdim=True) - repeated
    return lam * importance(inputs, config) + (1 - lam) * alone[:, :num_scored]


def importance(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """The window's attention to every entry before it.

    The largest *logit* of the query group, and one softmax over those; mean over the window's
    queries; pooled along the tokens.

    Returns:
        `[num_kv_heads, num_tokens - window]`, at least float32.
    """
    logits, sinks = window_logits(inputs), inputs.sinks
    num_kv_heads, _, num_tokens = logits.shape
    logits = logits.view(num_kv_heads, -1, len(inputs.query), num_tokens).amax(dim=1)
    if sinks is not None:
        of_heads = sinks.to(logits.dtype).view(num_kv_heads, -1).amax(dim=1)
        of_rows = of_heads[:, None, None].expand(-1, len(inputs.query), 1)
        logits = torch.cat((logits, of_rows), dim=-1)
    attention = torch.softmax(logits, dim=-1).mean(dim=1)[:, : inputs.num_scored]
    return pool(attention, config)


def redundancy(total: torch.Tensor, inputs: ScoringInputs) -> torch.Tensor:
    """How much each key is like the others of its head: the softmax of its mean cosine to them.

    `total` are `similarities`.

    Returns:
        `[num_kv_heads, num_tokens]`, sums to 1; 0 for absent entries.
    """
    is_absent = inputs.is_absent
    if is_absent is None:
        return torch.softmax(total / inputs.key.shape[1], dim=-1)
    means = total / (~is_absent).sum(dim=-1, keepdim=True)
    return torch.softmax(means.masked_fill_(is_absent, float("-inf")), dim=-1)
