"""Which entries a head retains."""

from collections.abc import Sequence
from math import fsum

from tests.oracle.types import Matrix, Vector


def best_first(scores: Vector) -> list[int]:
    """Tokens by score, the earlier token first on ties."""
    return sorted(range(len(scores)), key=lambda token: (-scores[token], token))


def select(scores: Matrix, budgets: Sequence[int]) -> list[tuple[int, int]]:
    """Retained `(head, token)` entries: the best of every head, ascending."""
    retained = []
    for head, row in enumerate(scores):
        retained += [(head, token) for token in sorted(best_first(row)[: budgets[head]])]
    return retained


def mass_stage(attention: Vector, mass: float, most: int) -> list[int]:
    """Stage 1 of DefensiveKV: the best tokens, until they and all others' place reach `mass`."""
    elsewhere = 1 - fsum(attention)
    taken: list[int] = []
    for token in best_first(attention)[:most]:
        if elsewhere + fsum(attention[t] for t in taken) >= mass:
            break
        taken.append(token)
    return taken


def select_two_stages(
    scores: Matrix, products: Matrix, budgets: Sequence[int], alpha: float, num_first: int = 0
) -> list[tuple[int, int]]:
    """Algorithm 1 of arXiv 2502.03805 inside every head's budget: by score, then by product.

    `num_first` entries with scores of infinity are all taken by the first stage.
    """
    retained = []
    for head, row in enumerate(scores):
        size = max(int(alpha * budgets[head]), min(num_first, budgets[head]))
        stage_1 = best_first(row)[:size]
        rest = [token for token in best_first(products[head]) if token not in stage_1]
        tokens = stage_1 + rest[: budgets[head] - len(stage_1)]
        retained += [(head, token) for token in sorted(tokens)]
    return retained


def select_perturbation(
    scores: Matrix, norms: Matrix, budgets: Sequence[int], alpha: float, eps: float
) -> list[tuple[int, int]]:
    """The same with the products `(score + eps) * norm`."""
    products = [
        [(score + eps) * norm for score, norm in zip(*rows, strict=True)]
        for rows in zip(scores, norms, strict=True)
    ]
    return select_two_stages(scores, products, budgets, alpha)
