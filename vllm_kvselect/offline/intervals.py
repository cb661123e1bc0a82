"""The one interval of what is measured off the engine: a bootstrap, the same every time."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import bootstrap

LEVEL = 0.95
NUM_RESAMPLES = 2000

Interval = tuple[float, float]


def interval(samples: Sequence[np.ndarray], statistic: Callable[..., Any]) -> Interval | None:
    """Percentile bootstrap of a number about samples, each of which is drawn apart: both its ends.

    None where a sample has a single value, which says nothing about others.
    """
    if min(map(len, samples)) == 1:
        return None
    found = bootstrap(
        samples,
        statistic,
        n_resamples=NUM_RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        rng=0,
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
