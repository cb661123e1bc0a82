"""Attention of a window's queries and of one decoding token."""

from collections.abc import Iterable, Sequence
from math import exp, fsum, inf
from operator import mul

from tests.oracle.types import Cube, Matrix, Vector


def dot(a: Vector, b: Vector) -> float:
    """Inner product: products rounded to float64, their sum exact."""
    return fsum(map(mul, a, b))


def softmax(logits: Vector, sink: float = -inf) -> list[float]:
    """Softmax of one row; `-inf` gets weight 0, and the weight of a sink goes to nobody."""
    largest = max(*logits, sink)
    powers = [exp(logit - largest) for logit in logits]
    total = fsum([*powers, exp(sink - largest)])
    return [power / total for power in powers]


def window_attention(
    query: Cube, key: Cube, scale: float, sinks: Vector | None = None
) -> list[list[list[float]]]:
    """Attention of the last prompt tokens: `[kv_head][member * window + index][token]`.

    `query[index][head]` is the query of token `num_tokens - window + index`; it sees the tokens up
    to itself. Query head `head` reads KV head `head // group`, and has the sink `sinks[head]`.
    """
    window, num_heads, num_kv_heads = len(query), len(query[0]), len(key)
    group = num_heads // num_kv_heads
    rows: list[list[list[float]]] = []
    for kv_head in range(num_kv_heads):
        num_tokens = len(key[kv_head])
        rows.append([])
        for member in range(group):
            for index in range(window):
                position = num_tokens - window + index
                logits = []
                sink = -inf if sinks is None else sinks[kv_head * group + member]
                for token in range(num_tokens):
                    if token > position:
                        logits.append(-inf)
                    else:
                        vector = query[index][kv_head * group + member]
                        logits.append(scale * dot(vector, key[kv_head][token]))
                rows[-1].append(softmax(logits, sink))
    return rows


def attend(query: Matrix, entries: Sequence[Sequence[tuple[Vector, Vector]]], scale: float) -> Cube:
    """Attention of one token's query heads over `entries[kv_head]`, pairs of key and value.

    Returns:
        `[kv_head][member of the query group][channel]`.
    """
    group = len(query) // len(entries)
    output: list[list[list[float]]] = []
    for kv_head, pairs in enumerate(entries):
        output.append([])
        for member in range(group):
            vector = query[kv_head * group + member]
            weights = softmax([scale * dot(vector, key) for key, _ in pairs])
            channels = range(len(pairs[0][1]))
            output[-1].append(
                [dot(weights, [v[channel] for _, v in pairs]) for channel in channels]
            )
    return output


def decode_attention(
    query: Matrix, key: Cube, value: Cube, retained: Iterable[tuple[int, int]], scale: float
) -> Cube:
    """Attention of one decode query given only the set of retained `(kv_head, token)` entries."""
    entries: list[list[tuple[Vector, Vector]]] = [[] for _ in key]
    for kv_head, token in sorted(retained):
        entries[kv_head].append((key[kv_head][token], value[kv_head][token]))
    return attend(query, entries, scale)
