"""Numbers about samples: shares with intervals, and digits worth keeping."""

from typing import Any

import numpy as np
import torch

from vllm_kvselect.offline.intervals import Interval, interval


def share_lower(one: torch.Tensor, other: torch.Tensor) -> float:
    """Share of heads in which `other` is lower than `one`, both averaged over the texts.

    Args:
        one: `[num_texts, ...]`, all further dimensions count heads.
        other: The same shape.
    """
    return (other.mean(0) < one.mean(0)).double().mean().item()


def share_interval(one: torch.Tensor, other: torch.Tensor) -> Interval | None:
    """Interval of `share_lower` over the texts; None for a single text."""
    texts = np.arange(len(one))
    return interval([texts], lambda pick: share_lower(one[pick], other[pick]))


def interval_text(ends: Interval | None) -> str:
    """An interval of shares as a cell of a table, empty where there is none."""
    return "" if ends is None else "{:.0%} to {:.0%}".format(*ends)


def rounded(values: torch.Tensor) -> Any:
    """Nested lists of five significant digits, enough for a record that is to be kept."""
    if values.dim():
        return [rounded(each) for each in values]
    return float(f"{values.item():.5g}")
