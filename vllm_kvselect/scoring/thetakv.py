"""ThetaKV, a step of our own: attention times norm, summed up by the bound of Theorem 2."""

import torch


def smoothed(attention: torch.Tensor, lam: float) -> torch.Tensor:
    """Attention as it is expected of later queries, `A' = (A + lam / n) / (1 + lam)`.

    The window is a sample of few queries. `lam` is the weight, in windows, of a prior that
    attends to all `n` tokens alike: the posterior mean under a Dirichlet prior. The eps of
    perturbation-constrained selection is this prior at the strength `lam = eps * n`.

    Args:
        attention: `[..., num_tokens]`.
        lam: Weight of the prior, not negative.

    Returns:
        The smoothed attention, of the same shape.
    """
    return (attention + lam / attention.shape[-1]) / (1 + lam)
