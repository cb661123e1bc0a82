import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.strategies import kv_heads, many, tied_scores
from tests.two_stages import select_perturbation
from vllm_kvselect.selecting.selection import mass_mask, select

alphas = st.one_of(st.sampled_from((0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 1.0)), st.floats(0.0, 1.0))
epsilons = st.sampled_from((0.0, 1e-4, 1.0))
Case = tuple[list[list[int]], list[list[int]], list[int]]


@st.composite
def selections(draw: st.DrawFn) -> Case:
    """Scores, norms and budgets, 0 and all entries of a head among them."""
    num_heads, num_tokens = draw(kv_heads), draw(st.integers(1, 40))
    scores = draw(tied_scores(num_heads, num_tokens))
    norms = draw(tied_scores(num_heads, num_tokens))
    size = st.one_of(st.sampled_from((0, 1, num_tokens)), st.integers(0, num_tokens))
    return scores, norms, draw(st.lists(size, min_size=num_heads, max_size=num_heads))


def double(values: list[list[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def entries(flat: torch.Tensor, num_tokens: int) -> list[tuple[int, int]]:
    """Flat indices as `(head, token)`, in the order they came."""
    assert flat.dtype == torch.int64
    return [divmod(index, num_tokens) for index in flat.tolist()]


def run_select(scores: list[list[int]], budgets: list[int]) -> list[tuple[int, int]]:
    flat = select(double(scores), torch.tensor(budgets), sum(budgets))
    return entries(flat, len(scores[0]))


def run_perturbation(case: Case, alpha: float, eps: float) -> list[tuple[int, int]]:
    scores, norms, budgets = case
    flat = select_perturbation(
        double(scores), double(norms), torch.tensor(budgets), sum(budgets), alpha, eps
    )
    return entries(flat, len(scores[0]))


@many
@given(selections())
def test_one_stage_equals_the_oracle(case: Case) -> None:
    scores, _, budgets = case
    assert run_select(scores, budgets) == oracle.select(scores, budgets)


@many
@given(selections(), alphas, epsilons)
def test_two_stages_equal_the_oracle(case: Case, alpha: float, eps: float) -> None:
    assert run_perturbation(case, alpha, eps) == oracle.select_perturbation(*case, alpha, eps)


@pytest.mark.parametrize("alpha", [0.07, 0.1, 0.29, 0.3, 0.57, 0.58, 0.7, 0.9, 1 / 3])
def test_stage_1_is_as_large_as_python_says(alpha: float) -> None:
    """`int(alpha * budget)`: 0.29 * 100 is 28 there, in float32 it would be 29."""
    budgets = list(range(0, 201))
    num_tokens = 400
    # Scores fall with the token, norms are 0 for the first half: stage 1 takes a prefix, stage 2
    # starts at the middle.
    scores = [list(range(num_tokens, 0, -1))] * len(budgets)
    norms = [[0] * 200 + [1] * 200] * len(budgets)
    chosen = run_perturbation((scores, norms, budgets), alpha, 0.0)
    for head, budget in enumerate(budgets):
        tokens = [token for h, token in chosen if h == head]
        stage_1 = int(alpha * budget)
        assert tokens == [*range(stage_1), *range(200, 200 + budget - stage_1)]


@pytest.mark.parametrize("num_tokens", [5, 16, 17, 100, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_keep_the_sinks(num_tokens: int, dtype: torch.dtype) -> None:
    scores = torch.zeros(3, num_tokens, dtype=dtype)
    budgets = torch.tensor([4, 0, num_tokens - 1])
    total = int(budgets.sum())
    expected = [(0, t) for t in range(4)] + [(2, t) for t in range(num_tokens - 1)]
    assert entries(select(scores, budgets, total), num_tokens) == expected
    flat = select_perturbation(scores, torch.ones_like(scores), budgets, total, 0.5, 1e-4)
    assert entries(flat, num_tokens) == expected
    # All products zero: stage 2 is a tie among what stage 1 left.
    flat = select_perturbation(scores, torch.zeros_like(scores), budgets, total, 0.5, 0.0)
    assert entries(flat, num_tokens) == expected


@many
@given(kv_heads, st.integers(1, 40), st.integers(0, 2**32 - 1), st.sampled_from((0, 0.5, 0.9)))
def test_stage_1_by_mass_equals_the_oracle(
    num_heads: int, num_tokens: int, seed: int, mass: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num_heads, num_tokens + 1, generator=generator, dtype=torch.float64)
    attention = torch.softmax(logits, dim=-1)[:, :num_tokens]
    most = num_tokens // 2
    expected = [
        [token in oracle.mass_stage(row, mass, most) for token in range(num_tokens)]
        for row in attention.tolist()
    ]
    assert mass_mask(attention, mass, most).tolist() == expected


def test_mass_is_reached_by_as_few_as_it_takes_and_the_tail_counts() -> None:
    attention = torch.tensor([[0.1, 0.5, 0.05, 0.15], [0.0, 0.0, 0.05, 0.0]])
    assert mass_mask(attention, 0.9, 4).tolist() == [[True, True, False, True], [False] * 4]
    assert mass_mask(attention, 0.9, 2).tolist() == [[False, True, False, True], [False] * 4]
    assert mass_mask(attention, 0.69, 4).tolist() == [[False, True, False, False], [False] * 4]


def test_large_norms_never_displace_what_stage_1_retained() -> None:
    case = ([[9, 8, 1, 1, 1, 1]], [[0, 0, 1, 2, 1000, 2000]], [4])
    assert run_perturbation(case, 0.5, 1e-4) == [(0, 0), (0, 1), (0, 4), (0, 5)]


def test_scores_that_share_memory_between_heads_are_ranked() -> None:
    scores = torch.arange(6.0).expand(3, -1)[:, :5]
    budgets = torch.tensor([1, 2, 3])
    chosen = entries(select(scores, budgets, 6), 5)
    assert chosen == [(0, 4), (1, 3), (1, 4), (2, 2), (2, 3), (2, 4)]
