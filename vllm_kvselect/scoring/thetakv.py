"""ThetaKV, a step of our own: attention times norm, summed up by the bound of Theorem 2."""

import torch


def smoothed(
    attention: torch.Tensor, lam: float, num_absent: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention as it is expected of later queries, `A' = (A + lam / n) / (1 + lam)`.

    The window is a sample of few queries. `lam` is the weight, in windows, of a prior that
    attends to all `n` tokens alike: the posterior mean under a Dirichlet prior. The eps of
    perturbation-constrained selection is this prior at the strength `lam = eps * n`.

    Args:
        attention: `[..., num_tokens]`.
        lam: Weight of the prior, not negative.
        num_absent: Columns that hold no token, `[...]`; None if all do.
    """
    prior = torch.full_like(attention[..., :1], lam / attention.shape[-1])
    if num_absent is not None:
        prior = lam / (attention.shape[-1] - num_absent[..., None]).to(attention.dtype)
    return (attention + prior) / (1 + lam)
