"""Exact pruning: projected value norms only for entries that could still be retained by them.

Stage 2 of perturbation-constrained selection ranks by `(score + eps) * ||V W_O||_1`. The L1 norm of
`h` numbers is at most `sqrt(h)` times their L2 norm, and the L2 norm is a quadratic form of the
value alone, far cheaper than the projection. Entries whose bound misses the cut need no norm.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_kvselect.scoring.inputs import absent_columns
from vllm_kvselect.scoring.value_norms import OutputProjection, value_norms
from vllm_kvselect.selecting.selection import best_mask, select, stage_2_keys


def select_pruned(
    scores: torch.Tensor,
    weights: torch.Tensor,
    value: torch.Tensor,
    projection: OutputProjection,
    budgets: torch.Tensor,
    num_retained: int,
    of_stage_1: torch.Tensor,
    eps: float,
    num_absent: torch.Tensor | None = None,
) -> torch.Tensor:
    """Perturbation-constrained selection in two stages (Algorithm 1 of arXiv 2502.03805).

    Stage 1 retains a head's best entries by score. Stage 2 fills the rest of the budget by
    `(weight + eps) * norm`, the entry's part of the bound on the output perturbation. Retains what
    it would with all norms, and computes only those that it needs.

    Args:
        scores: What stage 1 ranks by, `[num_kv_heads, num_tokens]`, not negative.
        weights: What stage 2 multiplies by the norms, of the same shape.
        value: `[num_kv_heads, num_tokens, head_size]`.
        projection: The layer's W_O.
        budgets: Entries per head, `[num_kv_heads]` int64, none above `num_tokens`.
        num_retained: Their sum, known without reading `budgets` back.
        of_stage_1: Entries per head that stage 1 retains, `[num_kv_heads]` int64.
        eps: Added to the weight in stage 2.
        num_absent: First columns of each head in which there is no entry, `[num_kv_heads]` int64,
            or None; heads have more entries than their budgets.

    Returns:
        Flat indices `head * num_tokens + token`, ascending, `[num_retained]` int64.
    """

    def norms_of(
        weights: torch.Tensor, taken: torch.Tensor, num_taken: torch.Tensor
    ) -> torch.Tensor:
        return needed_value_norms(weights, value, projection, taken, num_taken, eps)

    parts = Parts(best_mask, norms_of, select)
    given = (scores, weights, budgets, num_retained, of_stage_1, eps)
    return select_by_parts(parts, *given, num_absent)


class Parts(NamedTuple):
    """What two-stage selection is made of: references, or their twins.

    Attributes:
        best_mask: As of `selection`.
        norms_of: `(weights, taken, num_taken)` -> the norms that stage 2 needs of entries that are
            not taken, so many of each head.
        select: As of `selection`.
    """

    best_mask: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    norms_of: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    select: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def select_by_parts(
    parts: Parts,
    scores: torch.Tensor,
    weights: torch.Tensor,
    budgets: torch.Tensor,
    num_retained: int,
    of_stage_1: torch.Tensor,
    eps: float,
    num_absent: torch.Tensor | None,
) -> torch.Tensor:
    """`select_pruned`, made of given parts."""
    is_absent, num_taken = None, budgets
    if num_absent is not None:
        is_absent, num_taken = absent_columns(num_absent, scores.shape[1]), budgets + num_absent
        scores = scores.masked_fill(is_absent, float("-inf"))
        # Whatever a scorer says there, infinity included, times the value that is not there.
        weights = weights.masked_fill(is_absent, 0.0)
    stage_1 = parts.best_mask(scores, of_stage_1)
    # What is absent is not in the running, just as what stage 1 has taken.
    taken = stage_1 if is_absent is None else stage_1 | is_absent
    keys = stage_2_keys(weights, parts.norms_of(weights, taken, num_taken), stage_1, eps)
    if is_absent is not None:
        keys.masked_fill_(is_absent, float("-inf"))
    return parts.select(keys, budgets, num_retained)


def needed_value_norms(
    scores: torch.Tensor,
    value: torch.Tensor,
    projection: OutputProjection,
    stage_1: torch.Tensor,
    budgets: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The norms that stage 2 needs: with them it retains what it would with all.

    Twice as many entries as stage 2 retains, those with the best bounds, are projected first; what
    the last retained of them reaches is a cut that every retained entry reaches. Whose bound
    reaches it is projected too; all others cannot be retained, and get the norm 0.

    Args:
        scores: `[num_kv_heads, num_tokens]`, not negative.
        value: `[num_kv_heads, num_tokens, head_size]`.
        projection: The layer's W_O.
        stage_1: Entries that stage 1 retains, `[num_kv_heads, num_tokens]` bool, and absent ones.
        budgets: Entries per head, `[num_kv_heads]` int64; absent ones count as well.
        eps: Added to the score in stage 2.

    Returns:
        `[num_kv_heads, num_tokens]`: `value_norms` where it matters, else 0.
    """
    num_open = (budgets - stage_1.sum(dim=1))[:, None]
    norms = scores.new_zeros(scores.shape)
    if not (most := int(num_open.max())):
        return norms
    weights = scores + eps
    bounds = norm_bounds(value, projection).mul_(weights).masked_fill_(stage_1, -1.0)

    first = torch.topk(bounds, min(2 * most, scores.shape[1]), sorted=False).indices
    # Entries of stage 1 fill up heads that are nearly full, and are not in the running.
    keys = weights.gather(1, first) * _project(norms, value, projection, first)
    keys.masked_fill_(stage_1.gather(1, first), -1.0)
    cut = keys.sort(dim=1, descending=True).values.gather(1, (num_open - 1).clamp_(min=0))
    bounds.scatter_(1, first, -1.0)
    reaching = bounds >= cut.masked_fill_(num_open == 0, float("inf"))
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
    hidden_size = projection.weight.shape[3]
    wide = torch.promote_types(value.dtype, torch.float32)
    operand = value.to(projection.bound_form.dtype)
    products = torch.bmm(operand, projection.bound_form).mul_(operand)
    form = (products @ operand.new_ones(value.shape[2], 1)).squeeze(-1).to(wide)
    factor = rounding_factor(value.dtype, value.shape[2], hidden_size)
    return form.clamp_(min=0).mul_(hidden_size).sqrt_().mul_(factor)


def rounding_factor(dtype: torch.dtype, head_size: int, hidden_size: int) -> float:
    """Covers that the norms themselves are rounded: products and row sums."""
    wide = torch.promote_types(dtype, torch.float32)
    narrow, accumulator = torch.finfo(dtype).eps, torch.finfo(wide).eps
    return 1 + 4 * narrow + (hidden_size + head_size) * accumulator


def _project(
    norms: torch.Tensor, value: torch.Tensor, projection: OutputProjection, tokens: torch.Tensor
) -> torch.Tensor:
    """Fills in the norms of some tokens of each head, `[num_kv_heads, n]`, and returns them."""
    chosen = value.gather(1, tokens[..., None].expand(-1, -1, value.shape[2]))
    exact = value_norms(chosen, projection.weight).to(norms.dtype)
    norms.scatter_(1, tokens, exact)
    return exact
