"""Soft gates: a choice of the best entries that weights can be tuned through."""

import torch
import torch.nn.functional as F

_NUM_HALVINGS = 60
"""Of the range in which the threshold is looked for: more digits than float64 has."""


def log_gates(scores: torch.Tensor, share: float, softness: float) -> torch.Tensor:
    """Gates of entries that share one budget: near 1 for the best of them, near 0 for the rest.

    A gate is `sigmoid((score - threshold) / softness)`, and the threshold is the one at which the
    gates sum up to the budget. So raising one score lowers the other gates, as it does where the
    best entries are chosen. The smaller the softness, the nearer the gates are to that choice.

    Args:
        scores: Any shape, at least float32: logarithms, all of which compete.
        share: Share of the entries that the budget covers, between 0 and 1.
        softness: Unit of the scores. Positive.

    Returns:
        Logarithms of the gates, of the same shape; differentiable once, threshold included.
    """
    num_wanted = share * scores.numel()
    fixed = scores.detach() / softness
    low, high = fixed.min() - 40, fixed.max() + 40  # where all gates are open, and none is
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        too_many = torch.sigmoid(fixed - middle).sum() > num_wanted
        low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
    threshold = (low + high) / 2
    # Implicitly: the gates' sum stays what it is, so the threshold moves with the mean of the
    # scores, each weighted by its gate's slope.
    gates = torch.sigmoid(fixed - threshold)
    slopes = gates * (1 - gates)
    follows = (slopes * (scores / softness - fixed)).sum() / slopes.sum()
    return F.logsigmoid(scores / softness - threshold - follows)
