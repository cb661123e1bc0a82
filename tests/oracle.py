"""Brute force in float64: the published rules as loops over heads, queries and tokens.

Nothing here shares code with the package (only the configuration's field names), nothing is
vectorised, and sums are exact (`math.fsum`). Tensors come in as nested lists, `tensor.tolist()`,
which is exact for every floating-point type up to float64.
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import exp, fsum, inf
from operator import mul
from typing import NamedTuple

from vllm_kvselect.config import EvictionConfig

Vector = Sequence[float]
Matrix = Sequence[Vector]
Cube = Sequence[Matrix]

SAFEGUARD_UNIT = 2**16
"""Budgets are exact multiples of 1 / SAFEGUARD_UNIT entries: the safeguard is rounded to it."""


# --- attention ------------------------------------------------------------------------------------


def dot(a: Vector, b: Vector) -> float:
    """Inner product: products rounded to float64, their sum exact."""
    return fsum(map(mul, a, b))


def softmax(logits: Vector) -> list[float]:
    """Softmax of one row; `-inf` gets weight 0."""
    largest = max(logits)
    powers = [exp(logit - largest) for logit in logits]
    total = fsum(powers)
    return [power / total for power in powers]


def window_attention(query: Cube, key: Cube, scale: float) -> list[list[list[float]]]:
    """Attention of the last prompt tokens: `[kv_head][member * window + index][token]`.

    `query[index][head]` is the query of token `num_tokens - window + index`; it sees the tokens up
    to itself. Query head `head` reads KV head `head // group`.
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
                for token in range(num_tokens):
                    if token > position:
                        logits.append(-inf)
                    else:
                        vector = query[index][kv_head * group + member]
                        logits.append(scale * dot(vector, key[kv_head][token]))
                rows[-1].append(softmax(logits))
    return rows


def max_pool(scores: Vector, kernel_size: int) -> list[float]:
    """Maximum over `kernel_size` tokens centred on each token, cut off at both ends."""
    half = kernel_size // 2
    pooled = []
    for token in range(len(scores)):
        neighbours = [t for t in range(token - half, token + half + 1) if 0 <= t < len(scores)]
        pooled.append(max(scores[t] for t in neighbours))
    return pooled


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


# --- scores ---------------------------------------------------------------------------------------


def snapkv_scores(query: Cube, key: Cube, scale: float, kernel_size: int) -> list[list[float]]:
    """Mean attention of the window and the query group to each earlier token, max-pooled."""
    scores = []
    for rows in window_attention(query, key, scale):
        num_scored = len(rows[0]) - len(query)
        mean = [fsum(row[token] for row in rows) / len(rows) for token in range(num_scored)]
        scores.append(max_pool(mean, kernel_size))
    return scores


def streaming_llm_order(num_tokens: int, num_sinks: int) -> list[int]:
    """Tokens, best first: the sinks in order, then from the latest one back."""
    sinks = list(range(min(num_sinks, num_tokens)))
    return sinks + list(range(num_tokens - 1, len(sinks) - 1, -1))


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


# --- allocation -----------------------------------------------------------------------------------


def adaptive_budgets(scores: Matrix, even: int, safeguard: float) -> list[Fraction]:
    """Entries per head before rounding to pages: the blend of even and adaptive, exactly.

    Adaptive: how many of the layer's `even * num_heads` best entries are the head's. Equal scores
    fall to the earlier token, then to the lower head.
    """
    entries = [
        (-score, token, head) for head, row in enumerate(scores) for token, score in enumerate(row)
    ]
    best = sorted(entries)[: even * len(scores)]
    share = Fraction(round(safeguard * SAFEGUARD_UNIT), SAFEGUARD_UNIT)
    budgets = []
    for head in range(len(scores)):
        adaptive = sum(1 for _, _, owner in best if owner == head)
        budgets.append(share * even + (1 - share) * adaptive)
    return budgets


def largest_remainder(quotas: Sequence[Fraction]) -> list[int]:
    """Whole numbers with the quotas' sum: down, then up where most was lost, lower index first."""
    whole = [quota.numerator // quota.denominator for quota in quotas]
    num_left = sum(quotas) - sum(whole)
    lost = sorted(range(len(quotas)), key=lambda index: (whole[index] - quotas[index], index))
    for index in lost[: int(num_left)]:
        whole[index] += 1
    return whole


def adaptive_pages(scores: Matrix, num_packed: int, block_size: int, safeguard: float) -> list[int]:
    """Pages per head (AdaKV)."""
    budgets = adaptive_budgets(scores, num_packed * block_size, safeguard)
    return largest_remainder([budget / block_size for budget in budgets])


# --- selection ------------------------------------------------------------------------------------


def best_first(scores: Vector) -> list[int]:
    """Tokens by score, the earlier token first on ties."""
    return sorted(range(len(scores)), key=lambda token: (-scores[token], token))


def select(scores: Matrix, budgets: Sequence[int]) -> list[tuple[int, int]]:
    """Retained `(head, token)` entries: the best of every head, ascending."""
    retained = []
    for head, row in enumerate(scores):
        retained += [(head, token) for token in sorted(best_first(row)[: budgets[head]])]
    return retained


def select_perturbation(
    scores: Matrix, norms: Matrix, budgets: Sequence[int], alpha: float, eps: float
) -> list[tuple[int, int]]:
    """Algorithm 1 of arXiv 2502.03805 inside every head's budget."""
    retained = []
    for head, row in enumerate(scores):
        stage_1 = best_first(row)[: int(alpha * budgets[head])]
        rest = [token for token in range(len(row)) if token not in stage_1]
        rest.sort(key=lambda token: (-((row[token] + eps) * norms[head][token]), token))
        tokens = stage_1 + rest[: budgets[head] - len(stage_1)]
        retained += [(head, token) for token in sorted(tokens)]
    return retained


class Retained(NamedTuple):
    """What a layer retains of a prompt before the tail, and each head's pages."""

    entries: list[tuple[int, int]]
    pages: list[int]


def retain(
    query: Cube,
    key: Cube,
    value: Cube,
    output_projection: Sequence[Cube],
    scale: float,
    num_packed: int,
    block_size: int,
    config: EvictionConfig,
) -> Retained:
    """The whole choice of one layer; only the tokens that `value` covers compete."""
    num_kv_heads, num_tokens = len(value), len(value[0])
    pages = [num_packed] * num_kv_heads
    if config.method == "streaming-llm":
        order = streaming_llm_order(len(key[0]) - len(query), config.num_sinks)
        allowed = [token for token in order if token < num_tokens][: num_packed * block_size]
        entries = [(head, token) for head in range(num_kv_heads) for token in sorted(allowed)]
        return Retained(entries, pages)

    scores = [row[:num_tokens] for row in snapkv_scores(query, key, scale, config.kernel_size)]
    if config.method.startswith("adakv"):
        pages = adaptive_pages(scores, num_packed, block_size, config.safeguard)
    budgets = [block_size * count for count in pages]
    if config.method.endswith("-perturb"):
        norms = value_norms(value, output_projection)
        entries = select_perturbation(scores, norms, budgets, config.alpha, config.eps)
    else:
        entries = select(scores, budgets)
    return Retained(entries, pages)


# --- page tables ----------------------------------------------------------------------------------


def packed_places(packed: Sequence[int], pages: Sequence[int], block_size: int) -> Cube:
    """Where each head's retained entries lie: `[head][index] = (block, slot, offset)`.

    The pages of the packed blocks are handed out in order, block by block, slot by slot.
    """
    free_pages = [(block, slot) for block in packed for slot in range(len(pages))]
    places: list[list[tuple[int, int, int]]] = []
    for count in pages:
        own, free_pages = free_pages[:count], free_pages[count:]
        places.append([(block, slot, o) for block, slot in own for o in range(block_size)])
    return places


class Row(NamedTuple):
    """One (layer, request, KV head) as a sequence of a one-head paged cache."""

    pages: list[int]
    num_entries: int


def page_row(
    blocks: Sequence[int],
    seq_len: int,
    first_packed: int,
    tail_start: int,
    pages: Sequence[int],
    head: int,
    block_size: int,
) -> Row:
    """Pages of one KV head: its run in the packed blocks, then its slot of every tail block."""
    num_kv_heads = len(pages)
    row: list[int] = []
    for run_page in range(sum(pages[:head]), sum(pages[: head + 1])):
        block = blocks[first_packed + run_page // num_kv_heads]
        row.append(block * num_kv_heads + run_page % num_kv_heads)
    num_entries = len(row) * block_size
    for index in range(tail_start, len(blocks)):
        num_in_block = min(block_size, seq_len - index * block_size)
        if num_in_block > 0:
            row.append(blocks[index] * num_kv_heads + head)
            num_entries += num_in_block
    return Row(row, num_entries)
