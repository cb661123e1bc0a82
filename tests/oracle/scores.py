"""Scores, one paper after the other, and projected value norms."""

from cmath import rect
from collections.abc import Sequence
from itertools import product
from math import exp, fsum, inf, sqrt

from tests.oracle.attention import dot, softmax, window_attention
from tests.oracle.types import Cube, Matrix, Vector


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


def r_kv_scores(
    query: Cube,
    key: Cube,
    scale: float,
    kernel_size: int,
    pooling: str,
    lam: float,
    threshold: float,
    sinks: Vector | None = None,
) -> list[list[float]]:
    """Importance and redundancy; from the largest redundancy down, so that nothing is negative."""
    window, group = len(query), len(query[0]) // len(key)
    scores = []
    for kv_head, keys in enumerate(key):
        num_tokens = len(keys)
        heads = range(kv_head * group, (kv_head + 1) * group)
        sink = -inf if sinks is None else max(sinks[head] for head in heads)
        paid: list[list[float]] = [[] for _ in range(num_tokens)]
        for index in range(window):
            seen = num_tokens - window + index + 1
            asked = [query[index][head] for head in heads]
            logits = [max(scale * dot(vector, k) for vector in asked) for k in keys[:seen]]
            for token, weight in enumerate(softmax(logits, sink)):
                paid[token].append(weight)
        before_window = [fsum(row) / window for row in paid[: num_tokens - window]]
        attended = pool(before_window, kernel_size, pooling)
        units = [[x / sqrt(dot(vector, vector)) for x in vector] for vector in keys]
        likeness: list[list[float]] = [[] for _ in range(num_tokens)]
        for one, unit in enumerate(units):
            cosines = {t: dot(unit, units[t]) for t in range(num_tokens) if t != one}
            alike = [other for other, cosine in cosines.items() if cosine > threshold]
            for other, cosine in cosines.items():
                if not alike or other != max(alike):
                    likeness[other].append(cosine)
        repeated = softmax([fsum(row) / num_tokens for row in likeness])
        scores.append(
            [
                lam * i + (1 - lam) * (max(repeated) - r)
                for i, r in zip(attended, repeated[: num_tokens - window], strict=True)
            ]
        )
    return scores


def knorm_scores(key: Cube, window: int) -> list[list[float]]:
    """One over one plus the length of each key before the window: the shorter, the better."""
    return [[1 / (1 + sqrt(dot(k, k))) for k in keys[: len(keys) - window]] for keys in key]


def turned(vector: Vector, factors: Sequence[complex]) -> list[float]:
    """A vector whose channel `i` is the real and `i + half` the imaginary part of a number.

    Each number is multiplied by its factor; half of the channels are as many as the factors.
    """
    half = len(factors)
    numbers = [complex(vector[i], vector[half + i]) * factors[i] for i in range(half)]
    return [z.real for z in numbers] + [z.imag for z in numbers] + list(vector[2 * half :])


def expected_attention(
    query: Cube,
    key: Cube,
    scale: float,
    num_first: int,
    future: int,
    frequencies: Vector = (),
    sinks: Vector | None = None,
) -> list[list[float]]:
    """Attention that a normally distributed later query pays to each key, mean over the group.

    `query[position][head]` is rotated by its position, as are the keys. The first `num_first`
    queries and keys take no part, but there is always one query.
    """
    num_tokens, group = len(query), len(query[0]) // len(key)
    first = min(num_first, num_tokens - 1)
    later = range(num_tokens, num_tokens + future)
    average = [
        sum((rect(1, position * angle) for position in later), 0j) / future for angle in frequencies
    ]
    scores = []
    for kv_head, keys in enumerate(key):
        members = []
        for head in range(kv_head * group, (kv_head + 1) * group):
            before = [
                turned(query[t][head], [rect(1, -t * angle) for angle in frequencies])
                for t in range(first, num_tokens)
            ]
            mu, sigma = mean_and_covariance(before)
            mu, sigma = turned(mu, average), [turned(row, average) for row in sigma]
            sigma = [turned(column, average) for column in zip(*sigma, strict=True)]
            logits = []
            for k in keys[num_first:]:
                spread = dot(k, [dot(row, k) for row in sigma])
                logits.append(scale * dot(mu, k) + scale**2 * spread / 2)
            sink = -inf if sinks is None else sinks[head]
            members.append(softmax(logits, sink) if logits else [])
        scores.append([0.0] * min(num_first, num_tokens))
        scores[-1] += [mean(column) for column in zip(*members, strict=True)]
    return scores


def expected_attention_scores(
    attention: Matrix, value: Cube, window: int, eps: float, times_length: bool = True
) -> list[list[float]]:
    """That attention and eps, times the length of the value."""
    scores = []
    for row, values in zip(attention, value, strict=True):
        scored = min(len(row) - window, len(values))
        lengths = [sqrt(dot(v, v)) if times_length else 1.0 for v in values[:scored]]
        scores.append([(row[t] + eps) * lengths[t] for t in range(scored)])
    return scores


def probe_scores(
    key: Cube, value: Cube, probe: Matrix, frequencies: Vector, window: int
) -> list[list[float]]:
    """What a linear map says of each token.

    A KV head's map reads its key, turned back by its position, its value, and 1:
    `probe[feature][kv_head]`. Of equal tokens the later one is a little above the earlier one.
    """
    scores = []
    for kv_head, (keys, values) in enumerate(zip(key, value, strict=True)):
        weights = [row[kv_head] for row in probe]
        scores.append([])
        for t in range(min(len(keys) - window, len(values))):
            back = [rect(1, -t * angle) for angle in frequencies]
            features = [*turned(keys[t], back), *values[t], 1.0]
            scores[-1].append(exp(dot(features, weights) + t / 2**18))
    return scores


def mean_and_covariance(vectors: Matrix) -> tuple[list[float], list[list[float]]]:
    """The latter divided by the number of vectors."""
    columns = list(zip(*vectors, strict=True))
    center = [mean(column) for column in columns]
    apart = [[x - middle for x in column] for column, middle in zip(columns, center, strict=True)]
    return center, [[dot(a, b) / len(vectors) for b in apart] for a in apart]


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


def value_l2_norms(value: Cube, output_projection: Sequence[Cube]) -> list[list[float]]:
    """Root of the mean over the query group of `sum_c (sum_d value[d] * W_O[d, member, c])^2`."""
    norms: list[list[float]] = []
    for head, vectors in enumerate(value):
        projection = output_projection[head]
        group, hidden_size = len(projection[0]), len(projection[0][0])
        places = list(product(range(group), range(hidden_size)))
        columns = [[row[member][c] for row in projection] for member, c in places]
        norms.append(
            [
                sqrt(fsum(dot(vector, column) ** 2 for column in columns) / group)
                for vector in vectors
            ]
        )
    return norms
