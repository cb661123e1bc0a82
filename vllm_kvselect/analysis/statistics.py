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


def share_interval(one: torch.Tensor, other: torch.Tensor) -> list[float] | None:
    """95 % bootstrap interval of `share_lower` over the texts; the same every time.

    Returns:
        Both ends, or None for a single text, which says nothing about others.
    """
    if len(one) == 1:
        return None
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(one), (_NUM_RESAMPLES, len(one)), generator=generator)
    shares = torch.tensor([share_lower(one[pick], other[pick]) for pick in picks])
    return shares.quantile(torch.tensor([0.025, 0.975])).tolist()


def mean_and_error(values: list[float]) -> tuple[float, float | None]:
    """Mean and its standard error; None for a single value, which has no error to know."""
    sample = torch.tensor(values, dtype=torch.float64)
    if len(values) == 1:
        return sample.item(), None
    return sample.mean().item(), (sample.std() / len(values) ** 0.5).item()


def interval_text(interval: list[float] | None) -> str:
    """An interval of shares as a cell of a table, empty where there is none."""
    return "" if interval is None else "{:.0%} to {:.0%}".format(*interval)


def difference_text(difference: float, reach: float | None) -> str:
    """A difference as a cell of a table, with how far its interval reaches where that is known."""
    return f"{difference:+.3f}" + ("" if reach is None else f" ± {reach:.3f}")


def rounded(values: torch.Tensor) -> Any:
    """Nested lists of five significant digits, enough for a record that is to be kept."""
    if values.dim():
        return [rounded(each) for each in values]
    return float(f"{values.item():.5g}")
