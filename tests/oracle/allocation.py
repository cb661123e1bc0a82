"""Pages per KV head and per layer."""

from collections.abc import Sequence
from fractions import Fraction
from math import inf

from tests.oracle.selection import best_first
from tests.oracle.types import Matrix

SAFEGUARD_UNIT = 2**16
"""Budgets are exact multiples of 1 / SAFEGUARD_UNIT entries: the safeguard is rounded to it."""


def counts_of_best(scores: Matrix, even: int) -> list[int]:
    """How many of the `even * num_heads` best entries are each head's.

    Equal scores fall to the earlier token, then to the lower head.
    """
    entries = [
        (-score, token, head) for head, row in enumerate(scores) for token, score in enumerate(row)
    ]
    owners = [head for _, _, head in sorted(entries)[: even * len(scores)]]
    return [owners.count(head) for head in range(len(scores))]


def adaptive_budgets(
    scores: Matrix, even: int, safeguard: float, floor: str = "blend"
) -> list[Fraction]:
    """Entries per head before rounding to pages, exactly.

    `blend`: the even budget and the head's share of the best entries. `minimum`: the head's best
    `safeguard * even` entries, rounded down, come first; what scores minus infinity is not there.
    """
    if floor == "minimum":
        first = [best_first(row)[: int(safeguard * even)] for row in scores]
        raised = [
            [inf if t in first[head] and x > -inf else x for t, x in enumerate(row)]
            for head, row in enumerate(scores)
        ]
        return [Fraction(count) for count in counts_of_best(raised, even)]
    share = Fraction(round(safeguard * SAFEGUARD_UNIT), SAFEGUARD_UNIT)
    return [share * even + (1 - share) * count for count in counts_of_best(scores, even)]


def largest_remainder(quotas: Sequence[Fraction]) -> list[int]:
    """Whole numbers with the quotas' sum: down, then up where most was lost, lower index first."""
    whole = [quota.numerator // quota.denominator for quota in quotas]
    num_left = sum(quotas) - sum(whole)
    lost = sorted(range(len(quotas)), key=lambda index: (whole[index] - quotas[index], index))
    for index in lost[: int(num_left)]:
        whole[index] += 1
    return whole


def adaptive_pages(
    scores: Matrix, num_packed: int, block_size: int, safeguard: float, floor: str = "blend"
) -> list[int]:
    """Pages per head (AdaKV); without a safeguard, DefensiveKV's."""
    budgets = adaptive_budgets(scores, num_packed * block_size, safeguard, floor)
    return largest_remainder([budget / block_size for budget in budgets])


def first_tokens_first(scores: Matrix, num_first: int) -> Matrix:
    """Raises each head's first entries, which no head drops; minus infinity is no entry."""
    raised = []
    for row in scores:
        start = next((token for token, score in enumerate(row) if score > -inf), 0)
        first = range(start, start + num_first)
        raised.append([inf if token in first else score for token, score in enumerate(row)])
    return raised


def first_pages_first(scores: Matrix, num_entries: int) -> Matrix:
    """Raises as many of the best entries of each head as fill the pages of its first tokens."""
    raised = []
    for row in scores:
        first = [token for token in best_first(row)[:num_entries] if row[token] > -inf]
        raised.append([inf if token in first else score for token, score in enumerate(row)])
    return raised


def pyramid_blocks(
    num_packed: int, num_layers: int, num_blocks: int, beta: int, least: int = 1
) -> list[int]:
    """Packed blocks per layer (PyramidKV): an arithmetic sequence, its mean `num_packed`."""
    if num_layers == 1:
        return [num_packed]
    last = max(Fraction(min(least, num_packed)), Fraction(num_packed) / beta)
    first = 2 * num_packed - last
    if first > num_blocks:
        first, last = Fraction(num_blocks), Fraction(2 * num_packed - num_blocks)
    return largest_remainder(
        [first + (last - first) * Fraction(layer, num_layers - 1) for layer in range(num_layers)]
    )
