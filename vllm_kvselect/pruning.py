"""Exact pruning: projected value norms only for entries that could still be retained by them.

Stage 2 of perturbation-constrained selection ranks by `(score + eps) * ||V W_O||_1`. The L1 norm of
`h` numbers is at most `sqrt(h)` times their L2 norm, and the L2 norm is a quadratic form of the
value alone, far cheaper than the projection. Entries whose bound misses the cut need no norm.
"""

import torch

from vllm_kvselect.scoring.value_norms import OutputProjection, value_norms
from vllm_kvselect.selection import stage_1_mask


def needed_value_norms(
    scores: torch.Tensor,
    value: torch.Tensor,
    projection: OutputProjection,
    budgets: torch.Tensor,
    alpha: float,
    eps: float,
) -> torch.Tensor:
    """The norms that `select_perturbation` needs: with them it retains what it would with all.

    The entries with the best bounds, as many as stage 2 retains, are projected first; the worst of
    their keys is a cut that every retained entry reaches. Whoever's bound reaches it is projected
    too; all others cannot be retained, and get the norm 0.

    Args:
        scores: `[num_kv_heads, num_tokens]`, not negative.
        value: `[num_kv_heads, num_tokens, head_size]`.
        projection: The layer's W_O.
        budgets: Entries per head, `[num_kv_heads]` int64.
        alpha: Share of the budget that stage 1 fills.
        eps: Added to the score in stage 2.

    Returns:
        `[num_kv_heads, num_tokens]`: `value_norms` where it matters, else 0.
    """
    stage_1 = stage_1_mask(scores, budgets, alpha)
    num_open = (budgets - stage_1.sum(dim=1))[:, None]
    norms = scores.new_zeros(scores.shape)
    if not (most := int(num_open.max())):
        return norms
    weights = scores + eps
    bounds = (weights * norm_bounds(value, projection)).masked_fill_(stage_1, -1.0)

    first = torch.topk(bounds, most, sorted=False).indices
    keys = weights.gather(1, first) * _project(norms, value, projection, first)
    cut = keys.sort(dim=1, descending=True).values.gather(1, (num_open - 1).clamp(min=0))
    bounds.scatter_(1, first, -1.0)
    reaching = bounds >= cut.masked_fill(num_open == 0, float("inf"))
    if most := int(reaching.sum(dim=1).max()):
        second = torch.topk(bounds, most, sorted=False).indices
        _project(norms, value, projection, second)
    return norms


def norm_bounds(value: torch.Tensor, projection: OutputProjection) -> torch.Tensor:
    """Upper bounds of `value_norms`, rounding included.

    `mean_j ||v W_j||_1 <= sqrt(h) mean_j ||v W_j||_2 <= sqrt(h v G v^T)` with `G` the mean of
    `W_j W_j^T` over the query group (Cauchy and Schwarz, then Jensen).

    Args:
        value: `[num_kv_heads, num_tokens, head_size]`.
        projection: The layer's W_O.

    Returns:
        `[num_kv_heads, num_tokens]`, at least float32.
    """
    gram, hidden_size = projection.gram, projection.weight.shape[3]
    # `v G` is rounded to the value's dtype, and so are G and the products with v: one eps each at
    # most. Summation costs one of the accumulator's a term. All are relative to |v| |G| |v|, which
    # the largest row sum of |G| bounds: as much is added to the diagonal.
    narrow, accumulator = torch.finfo(value.dtype).eps, torch.finfo(gram.dtype).eps
    slack = 4 * narrow + 2 * value.shape[2] * accumulator
    largest = gram.abs().sum(dim=-1).amax(dim=-1)
    diagonal = torch.diag_embed(largest[:, None].expand(-1, value.shape[2]) * slack)
    products = torch.bmm(value, (gram + diagonal).to(value.dtype)).mul_(value)
    form = (products @ value.new_ones(value.shape[2], 1)).squeeze(-1).to(gram.dtype)
    # The norms themselves are rounded too: products and row sums.
    relative = 1 + 4 * narrow + (hidden_size + value.shape[2]) * accumulator
    return (hidden_size * form.clamp_(min=0)).sqrt_() * relative


def _project(
    norms: torch.Tensor, value: torch.Tensor, projection: OutputProjection, tokens: torch.Tensor
) -> torch.Tensor:
    """Fills in the norms of some tokens of each head, `[num_kv_heads, n]`, and returns them."""
    chosen = value.gather(1, tokens[..., None].expand(-1, -1, value.shape[2]))
    exact = value_norms(chosen, projection.weight).to(norms.dtype)
    norms.scatter_(1, tokens, exact)
    return exact
