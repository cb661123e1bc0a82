"""KVzip from the queries and keys of a context and of the replay that follows it."""

from collections.abc import Iterable

from tests.oracle.attention import dot, softmax
from tests.oracle.types import Cube


def kvzip_scores(
    query: Cube, key: Cube, scale: float, num_context: int, chunk: range, read: Iterable[int]
) -> list[list[float]]:
    """Most attention of any query of the replay to each token of a chunk of the context.

    `query[position][head]` and `key[kv_head][position]` run through context and replay. A softmax
    is over the tokens of the context in `read` and the replay up to the query's own token.
    """
    group = len(query[0]) // len(key)
    columns = sorted(read)
    scores = []
    for kv_head, keys in enumerate(key):
        most = dict.fromkeys(chunk, 0.0)
        for position in range(num_context, len(query)):
            seen = [*columns, *range(num_context, position + 1)]
            for vector in query[position][kv_head * group : (kv_head + 1) * group]:
                weights = softmax([scale * dot(vector, keys[token]) for token in seen])
                for token, weight in zip(seen, weights, strict=True):
                    if token in most:
                        most[token] = max(most[token], weight)
        scores.append([most[token] for token in chunk])
    return scores
