"""Numbers about samples: shares with intervals, means with errors, and digits worth keeping."""

from typing import Any

import torch

_NUM_RESAMPLES = 1000


def share_lower(one: torch.Tensor, other: torch.Tensor) -> float:
    """Share of heads in which `other` is lower than `one`, both averaged over the texts.

    Args:
        one: `[num_texts, ...]`, all further dimensions count heads.
        other: The same shape.
    """
    return (other.mean(0) < one.mean(0)).double().mean().item()


def share_interval(one: torch.Tensor, other: torch.Tensor) -> list[float]:
    """95 % bootstrap interval of `share_lower` over the texts; the same every time."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(one), (_NUM_RESAMPLES, len(one)), generator=generator)
    shares = torch.tensor([share_lower(one[pick], other[pick]) for pick in picks])
    return shares.quantile(torch.tensor([0.025, 0.975])).tolist()


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error; 0 for a single value."""
    sample = torch.tensor(values, dtype=torch.float64)
    error = sample.std() / len(values) ** 0.5 if len(values) > 1 else torch.zeros(())
    return sample.mean().item(), error.item()


def rounded(values: torch.Tensor) -> Any:
    """Nested lists of five significant digits, enough for a record that is to be kept."""
    if values.dim():
        return [rounded(each) for each in values]
    return float(f"{values.item():.5g}")
