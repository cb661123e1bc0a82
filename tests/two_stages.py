"""Selection in two stages with all norms at hand, which pruning must not differ from."""

import torch

from vllm_kvselect.selecting.selection import best_mask, select, stage_1_counts, stage_2_keys


def select_perturbation(
    scores: torch.Tensor,
    norms: torch.Tensor,
    budgets: torch.Tensor,
    num_retained: int,
    alpha: float,
    eps: float,
) -> torch.Tensor:
    """Perturbation-constrained selection in two stages (Algorithm 1 of arXiv 2502.03805).

    Stage 1 retains `floor(alpha * budget)` entries of a head by score. Stage 2 fills the rest of
    the budget by `(score + eps) * norm`, the entry's part of the bound on the output perturbation.

    Args:
        scores: `[num_kv_heads, num_tokens]`, not negative.
        norms: `||V W_O||_1`, `[num_kv_heads, num_tokens]`.
        budgets: Entries per head, `[num_kv_heads]` int64, none above `num_tokens`.
        num_retained: Their sum, known without reading `budgets` back.
        alpha: Share of the budget that stage 1 fills, 0 to 1.
        eps: Added to the score in stage 2.

    Returns:
        Flat indices `head * num_tokens + token`, ascending, `[num_retained]` int64.
    """
    stage_1 = best_mask(scores, stage_1_counts(budgets, alpha))
    return select(stage_2_keys(scores, norms, stage_1, eps), budgets, num_retained)
