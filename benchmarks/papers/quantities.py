"""The papers' quantities (arXiv 2502.03805) for given attention weights and retained entries.

In the paper's notation, for one query: `A` are the attention weights over all entries, `N` marks
the retained ones, `A' = N A / sum(N A)` are the weights after the drop, and `V W_O` the projected
values.
"""

from typing import Literal, get_args

import torch

from vllm_kvselect.offline.capture import Layer
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.snapkv import window_attention
from vllm_kvselect.scoring.value_norms import value_norms

Metric = Literal["l1", "l2", "cosine"]
METRICS: tuple[Metric, ...] = get_args(Metric)


def following_attention(layer: Layer, num_prompt_tokens: int) -> torch.Tensor:
    """Attention of the tokens that follow the prompt, over the full cache: `A`.

    Args:
        layer: Captured from the prompt and what follows it.
        num_prompt_tokens: Length of the prompt.

    Returns:
        `[num_heads, num_following, num_tokens]`: rows sum to 1.
    """
    query = layer.query[num_prompt_tokens:]
    weights = window_attention(ScoringInputs(query, layer.key, layer.value, layer.scale))
    return weights.view(query.shape[1], query.shape[0], -1)


def retained_attention(weights: torch.Tensor, retained: torch.Tensor) -> torch.Tensor:
    """Keeps the weights of retained entries: `N A`, not normalised.

    Args:
        weights: `A`, `[num_heads, num_following, num_tokens]`.
        retained: Of the prompt, `[num_kv_heads, num_prompt_tokens]` bool; what follows the prompt
            is always retained.

    Returns:
        `[num_heads, num_following, num_tokens]`.
    """
    num_kv_heads, num_prompt_tokens = retained.shape
    kept = weights.clone()
    by_kv_head = kept.view(num_kv_heads, -1, weights.shape[-1])
    by_kv_head[..., :num_prompt_tokens] *= retained[:, None]
    return kept


def mass(weights: torch.Tensor) -> torch.Tensor:
    """Attention mass of what is retained, `sum(N A)`, `[num_heads, num_following]`."""
    return weights.sum(dim=-1)


def head_outputs(layer: Layer, weights: torch.Tensor) -> torch.Tensor:
    """Each query head's part of the layer's output, `A V W_O`.

    Args:
        layer: Gives values and W_O.
        weights: Attention weights, normalised here: `[num_heads, num_following, num_tokens]`.

    Returns:
        `[num_heads, num_following, hidden_size]`.
    """
    num_heads, num_following, num_tokens = weights.shape
    num_kv_heads, _, head_size = layer.value.shape
    group = num_heads // num_kv_heads
    value = layer.value.to(weights.dtype)
    output = weights.view(num_kv_heads, -1, num_tokens) @ value
    output = output.view(num_heads, num_following, head_size) / mass(weights)[..., None]
    # [num_kv_heads, head_size, group, hidden_size] -> [num_heads, head_size, hidden_size]
    projection = layer.output_projection.weight.to(weights.dtype).transpose(1, 2)
    return output @ projection.reshape(num_kv_heads * group, head_size, -1)


def distance(full: torch.Tensor, dropped: torch.Tensor, metric: Metric = "l1") -> torch.Tensor:
    """Distance of two outputs along the hidden size; `l1` is the paper's perturbation `L`.

    Args:
        full: `[..., hidden_size]`, of the full cache.
        dropped: The same shape.
        metric: `l1` and `l2` are norms of the difference, `cosine` is 1 minus the cosine.

    Returns:
        `[...]`.
    """
    if metric == "cosine":
        return 1 - torch.cosine_similarity(full, dropped, dim=-1)
    return torch.linalg.vector_norm(full - dropped, ord=1 if metric == "l1" else 2, dim=-1)


def projected_norms(layer: Layer, dtype: torch.dtype) -> torch.Tensor:
    """`||V W_O||_1` of every entry and query head, `[num_heads, num_tokens]`."""
    weight = layer.output_projection.weight.to(dtype)
    num_kv_heads, head_size, group, hidden_size = weight.shape
    per_head = weight.transpose(1, 2).reshape(num_kv_heads * group, head_size, 1, hidden_size)
    return value_norms(layer.value.to(dtype).repeat_interleave(group, dim=0), per_head)


def theta(weights: torch.Tensor, kept: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """The upper bound of the perturbation (Theorem 2).

    `theta = C - (2 - 1 / sum(N A)) * sum(N A ||V W_O||_1)` with `C = sum(A ||V W_O||_1)`.

    Args:
        weights: `A`, `[num_heads, num_following, num_tokens]`.
        kept: `N A`, the same shape.
        norms: `||V W_O||_1`, `[num_heads, num_tokens]`.

    Returns:
        `[num_heads, num_following]`.
    """
    everything = (weights @ norms[..., None]).squeeze(-1)
    retained = (kept @ norms[..., None]).squeeze(-1)
    return everything - (2 - 1 / mass(kept)) * retained
