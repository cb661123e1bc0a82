"""Theorems 2 and 3 of arXiv 2502.03805: what selection by attention times norm is for.

In the paper's notation, one head and one query: attention weights `A` over `n` entries, `N` the 0-1
mask of those retained, rows `P_i = V_i W_O`. Evicting the others renormalises the weights to
`A'_i = N_i A_i / sum_j N_j A_j`, and moves the output by `L = ||sum_i (A_i - A'_i) P_i||_1`.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import many, seeds
from tests.two_stages import select_perturbation
from vllm_kvselect.scoring.value_norms import value_norms


class Head:
    """Random attention, values and W_O of one head: `A`, `P` and `||P_i||_1`."""

    def __init__(self, seed: int, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator, dtype=torch.float64)

        sharpness = 6 * torch.rand(1, generator=generator, dtype=torch.float64)
        self.attention = torch.softmax(sharpness * normal(num_tokens), dim=0)
        value = normal(1, num_tokens, 8) * torch.exp(normal(num_tokens, 1))
        weight = normal(1, 8, 1, 12)
        self.projected = value[0] @ weight[0, :, 0]
        self.norms = value_norms(value, weight)[0]

    def perturbation(self, retained: torch.Tensor) -> torch.Tensor:
        """`L`, the actual distance, from the renormalised output."""
        weights = self.attention * retained
        moved = self.attention @ self.projected - (weights / weights.sum()) @ self.projected
        return moved.abs().sum()

    def theta(self, retained: torch.Tensor) -> torch.Tensor:
        """The bound of Theorem 2: `C - (2 - 1 / sum_i N_i A_i) sum_i N_i A_i ||P_i||_1`."""
        return self._bound(retained, (self.attention * retained).sum())

    def relaxed_theta(self, retained: torch.Tensor, stage_1: torch.Tensor) -> torch.Tensor:
        """The bound of Theorem 3: the factor of theta with stage 1's mass in place of the whole."""
        return self._bound(retained, (self.attention * stage_1).sum())

    def _bound(self, retained: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        parts = self.attention * self.norms
        return parts.sum() - (2 - 1 / mass) * (parts * retained).sum()


def mask(num_tokens: int, tokens: list[int]) -> torch.Tensor:
    index = torch.tensor(tokens, dtype=torch.int64)
    return torch.zeros(num_tokens, dtype=torch.float64).index_fill_(0, index, 1)


def algorithm_1(head: Head, budget: int, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What the package retains with eps 0, and what its stage 1 does."""
    rows = (head.attention[None], head.norms[None])
    num_tokens = len(head.attention)
    both = select_perturbation(*rows, torch.tensor([budget]), budget, alpha, 0.0)
    size = int(alpha * budget)
    first = select_perturbation(*rows, torch.tensor([size]), size, 1.0, 0.0)
    return mask(num_tokens, both.tolist()), mask(num_tokens, first.tolist())


@many
@given(data=st.data(), seed=seeds, num_tokens=st.integers(1, 40))
def test_theorem_2_the_perturbation_never_exceeds_theta(
    data: st.DataObject, seed: int, num_tokens: int
) -> None:
    """`L <= theta`, for every choice of retained entries."""
    head = Head(seed, num_tokens)
    tokens = data.draw(st.sets(st.integers(0, num_tokens - 1), min_size=1))
    retained = mask(num_tokens, sorted(tokens))
    assert head.perturbation(retained) <= head.theta(retained) * (1 + 1e-12) + 1e-12


@many
@given(seed=seeds, num_tokens=st.integers(1, 40))
def test_theorem_2_is_tight_where_all_is_retained(seed: int, num_tokens: int) -> None:
    """Then `theta = C - C = 0`."""
    head, everything = Head(seed, num_tokens), torch.ones(num_tokens, dtype=torch.float64)
    assert abs(float(head.theta(everything))) <= 1e-10 * float(head.norms.max())
    assert float(head.perturbation(everything)) <= 1e-10 * float(head.norms.max())


def test_theorem_2_is_reached() -> None:
    """One channel, opposite signs of what is dropped and what stays: no slack at all."""
    head = Head(0, 2)
    head.attention = torch.tensor([0.75, 0.25], dtype=torch.float64)
    head.projected = torch.tensor([[1.0], [-3.0]], dtype=torch.float64)
    head.norms = torch.tensor([1.0, 3.0], dtype=torch.float64)
    retained = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert float(head.perturbation(retained)) == pytest.approx(1.0)
    assert float(head.theta(retained)) == pytest.approx(1.0)


@many
@given(
    data=st.data(),
    seed=seeds,
    num_tokens=st.integers(2, 40),
    alpha=st.sampled_from((0.25, 0.5, 0.75)),
)
def test_theorem_3_no_other_stage_2_has_a_smaller_bound(
    data: st.DataObject, seed: int, num_tokens: int, alpha: float
) -> None:
    """Given stage 1 with `sum A > 0.5` (the paper's assumption), stage 2 minimises its bound.

    The relaxed bound is `C - (2 - 1 / sum_{stage 1} A) sum_i N_i A_i ||P_i||_1`; whatever stage 2
    adds, theta lies below it, since retaining more only raises the factor.
    """
    head = Head(seed, num_tokens)
    budget = data.draw(st.integers(1, num_tokens))
    retained, stage_1 = algorithm_1(head, budget, alpha)
    assert (stage_1 <= retained).all()
    if (head.attention * stage_1).sum() <= 0.5:
        return
    best = head.relaxed_theta(retained, stage_1)
    assert head.theta(retained) <= best * (1 + 1e-12) + 1e-12
    generator = torch.Generator().manual_seed(seed)
    open_tokens = torch.nonzero(stage_1 == 0).flatten()
    num_open = budget - int(stage_1.sum())
    for _ in range(20):
        order = torch.randperm(len(open_tokens), generator=generator)
        other = stage_1.index_fill(0, open_tokens[order[:num_open]], 1)
        assert best <= head.relaxed_theta(other, stage_1) * (1 + 1e-12) + 1e-12


def test_the_assumption_is_met_often_enough_to_test_something() -> None:
    met = [
        float((head.attention * algorithm_1(head, 20, 0.5)[1]).sum()) > 0.5
        for head in (Head(seed, 40) for seed in range(50))
    ]
    assert 25 <= sum(met) < 50


def test_without_the_assumption_stage_2_would_raise_the_bound() -> None:
    """Below a mass of 0.5 the factor `2 - 1 / mass` is negative: why stage 1 comes first."""
    head = Head(0, 4)
    head.attention = torch.full((4,), 0.25, dtype=torch.float64)
    stage_1, both = mask(4, [0]), mask(4, [0, 1])
    assert head.relaxed_theta(both, stage_1) > head.relaxed_theta(stage_1, stage_1)


@many
@given(data=st.data(), seed=seeds)
def test_the_sum_of_the_heads_bounds_bounds_the_layer(data: st.DataObject, seed: int) -> None:
    """ThetaKV's objective: heads add up in the residual stream, so their bounds do."""
    heads = [Head(seed + index, 10) for index in range(3)]
    total, theta = torch.zeros(12, dtype=torch.float64), 0.0
    for head in heads:
        tokens = data.draw(st.sets(st.integers(0, 9), min_size=1))
        retained = mask(10, sorted(tokens))
        weights = head.attention * retained
        total += head.attention @ head.projected - (weights / weights.sum()) @ head.projected
        theta += float(head.theta(retained))
    assert float(total.abs().sum()) <= theta * (1 + 1e-12) + 1e-12
