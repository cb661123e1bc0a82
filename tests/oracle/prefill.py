"""Which blocks CritiPrefill's segments read, written out in loops and float64."""

import math
from collections.abc import Sequence

from tests.oracle.types import Vector


def critical(
    queries: Sequence[Sequence[Vector]], keys: Sequence[Vector], size: int, block: int, scale: float
) -> list[list[float]]:
    """What share of a segment's attention should go to each block before it.

    Args:
        queries: Of each head of one query group, a vector per token.
        keys: Of their KV head, a vector per token.
        size: Tokens of a segment.
        block: Tokens of a block.
        scale: Factor of the products.

    Returns:
        For each segment one number per block before it; none for the first one.
    """
    shares = []
    for start in range(0, len(keys), size):
        logits = []
        for first in range(0, start, block):
            block_keys = keys[first : first + block]
            means = [_product(head[start : start + size], block_keys, scale) for head in queries]
            logits.append(sum(means) / len(means))
        most = max(logits, default=0.0)
        weights = [math.exp(logit - most) for logit in logits]
        shares.append([weight / sum(weights) for weight in weights])
    return shares


def _product(queries: Sequence[Vector], keys: Sequence[Vector], scale: float) -> float:
    """Two representatives of queries, two of keys: the mean over those, the larger of these."""
    means = []
    for key in (_channelwise(max, keys), _channelwise(min, keys)):
        products = [
            sum(a * b for a, b in zip(query, key, strict=True)) * scale
            for query in (_channelwise(max, queries), _channelwise(min, queries))
        ]
        means.append(sum(products) / 2)
    return max(means)


def _channelwise(pick: type[max] | object, vectors: Sequence[Vector]) -> list[float]:
    return [pick(channel) for channel in zip(*vectors, strict=True)]  # type: ignore[operator]


def most_critical(shares: Sequence[float], count: int) -> set[int]:
    """The blocks with the largest shares."""
    return set(sorted(range(len(shares)), key=lambda index: -shares[index])[:count])
