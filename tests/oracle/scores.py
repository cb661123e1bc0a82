"""Scores, one paper after the other, and projected value norms."""

from collections.abc import Sequence
from math import fsum, inf, sqrt

from tests.oracle.attention import dot, softmax, window_attention
from tests.oracle.types import Cube, Vector


def mean(values: Vector) -> float:
    """Arithmetic mean, the sum exact."""
    return fsum(values) / len(values)


def pool(scores: Vector, kernel_size: int, pooling: str = "max") -> list[float]:
    """Maximum or mean over `kernel_size` tokens centred on each token.

    Beyond both ends there is nothing for the maximum and zeros for the mean.
    """
    half = kernel_size // 2
    pooled = []
    for token in range(len(scores)):
        neighbours = [t for t in range(token - half, token + half + 1) if 0 <= t < len(scores)]
        values = [scores[t] for t in neighbours]
        pooled.append(max(values) if pooling == "max" else fsum(values) / kernel_size)
    return pooled


def snapkv_scores(
    query: Cube,
    key: Cube,
    scale: float,
    kernel_size: int,
    pooling: str = "max",
    group_reduction: str = "mean",
    sinks: Vector | None = None,
) -> list[list[float]]:
    """The window's attention to each earlier token: its mean, reduced over the group, pooled."""
    window, group = len(query), len(query[0]) // len(key)
    scores = []
    for rows in window_attention(query, key, scale, sinks):
        reduced = []
        for token in range(len(rows[0]) - window):
            members = [
                mean([rows[member * window + index][token] for index in range(window)])
                for member in range(group)
            ]
            reduced.append(mean(members) if group_reduction == "mean" else max(members))
        scores.append(pool(reduced, kernel_size, pooling))
    return scores


def streaming_llm_order(num_tokens: int, num_sinks: int) -> list[int]:
    """Tokens, best first: the sinks in order, then from the latest one back."""
    sinks = list(range(min(num_sinks, num_tokens)))
    return sinks + list(range(num_tokens - 1, len(sinks) - 1, -1))


def h2o_scores(
    query: Cube, key: Cube, scale: float, window: int, sinks: Vector | None = None
) -> list[list[float]]:
    """Attention that all prompt queries pay to each token before the window, summed up.

    `query[position][head]`: every query sees the tokens up to itself. Mean over the query group.
    """
    num_tokens, group = len(query), len(query[0]) // len(key)
    scores = []
    for kv_head in range(len(key)):
        gathered: list[list[float]] = [[] for _ in range(num_tokens)]
        for position in range(num_tokens):
            for member in range(group):
                head = kv_head * group + member
                vector, sink = query[position][head], -inf if sinks is None else sinks[head]
                logits = [scale * dot(vector, k) for k in key[kv_head][: position + 1]]
                for token, weight in enumerate(softmax(logits, sink)):
                    gathered[token].append(weight)
        scores.append([fsum(weights) / group for weights in gathered[: num_tokens - window]])
    return scores


def keydiff_scores(key: Cube, window: int) -> list[list[float]]:
    """One minus the cosine of each key before the window to the mean of all unit keys."""
    scores = []
    for keys in key:
        units = [[x / sqrt(dot(vector, vector)) for x in vector] for vector in keys]
        anchor = [fsum(column) / len(units) for column in zip(*units, strict=True)]
        length = sqrt(dot(anchor, anchor))
        scores.append([1 - dot(unit, anchor) / length for unit in units[: len(units) - window]])
    return scores


def defensive_scores(
    query: Cube,
    key: Cube,
    scale: float,
    kernel_size: int,
    pooling: str,
    sinks: Vector | None = None,
) -> list[list[float]]:
    """Most attention of any row to each token, pooled; what is below their mean is raised to it.

    With mean pooling a row is scaled after it, to the sum that it had before.
    """
    scores = []
    for rows in window_attention(query, key, scale, sinks):
        pooled = []
        for row in rows:
            scored = row[: len(row) - len(query)]
            smooth = pool(scored, kernel_size, pooling)
            if pooling == "mean":
                smooth = [value * fsum(scored) / fsum(smooth) for value in smooth]
            pooled.append(smooth)
        worst = [max(column) for column in zip(*pooled, strict=True)]
        scores.append([max(value, mean(worst)) for value in worst])
    return scores


def random_scores(seed: int, layer: int, num_heads: int, num_tokens: int) -> list[list[int]]:
    """Upper 24 bits of a chained 32-bit hash of seed, layer, head and token."""

    def scramble(state: int) -> int:
        state = (state + 0x9E3779B9) % 2**32
        state = (state ^ state // 2**16) * 0x45D9F3B % 2**32
        state = (state ^ state // 2**16) * 0x45D9F3B % 2**32
        return state ^ state // 2**16

    start = scramble(scramble(seed) + layer)
    heads = [scramble(start + head) for head in range(num_heads)]
    return [[scramble(head + token) // 2**8 for token in range(num_tokens)] for head in heads]


def value_norms(value: Cube, output_projection: Sequence[Cube]) -> list[list[float]]:
    """Mean over the query group of `sum_c |sum_d value[d] * W_O[d, member, c]|`."""
    norms: list[list[float]] = []
    for head, vectors in enumerate(value):
        projection = output_projection[head]
        group, hidden_size = len(projection[0]), len(projection[0][0])
        norms.append([])
        for vector in vectors:
            of_member = []
            for member in range(group):
                columns = [[row[member][c] for row in projection] for c in range(hidden_size)]
                of_member.append(fsum(abs(dot(vector, column)) for column in columns))
            norms[-1].append(fsum(of_member) / group)
    return norms
