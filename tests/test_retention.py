from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.retention import RetentionPlan, budget_entries, plan

many = settings(max_examples=300, deadline=None, derandomize=True)

prompt_lens = st.integers(1, 3000)
block_sizes = st.sampled_from((1, 4, 16, 32, 128))
windows = st.integers(1, 100)
budgets = st.one_of(st.integers(1, 3500), st.floats(0.001, 1.0))


def make(budget: int | float, window: int) -> EvictionConfig:
    return EvictionConfig.parse({"budget": budget, "window": window})


def retained(num_prompt_tokens: int, block_size: int, config: EvictionConfig) -> int:
    planned = plan(num_prompt_tokens, block_size, config)
    return num_prompt_tokens - (planned.first_packed * block_size if planned else 0)


@many
@given(prompt_lens, block_sizes, budgets, windows)
def test_blocks_partition_the_prompt(
    prompt_len: int, block_size: int, budget: int | float, window: int
) -> None:
    planned = plan(prompt_len, block_size, make(budget, window))
    if planned is None:
        return
    num_blocks = ceil(prompt_len / block_size)
    assert 0 < planned.first_packed < planned.tail_start <= num_blocks
    assert planned.num_packed >= 1
    assert planned.first_packed + planned.num_packed == planned.tail_start


@many
@given(prompt_lens, block_sizes, budgets, windows)
def test_budget_is_met_in_whole_blocks(
    prompt_len: int, block_size: int, budget: int | float, window: int
) -> None:
    config = make(budget, window)
    planned = plan(prompt_len, block_size, config)
    if planned is None:
        return
    entries = retained(prompt_len, block_size, config)
    assert entries >= budget_entries(prompt_len, config)
    # One packed block is the least there is, however little the budget leaves for it.
    if planned.num_packed > 1:
        assert entries < budget_entries(prompt_len, config) + block_size


@many
@given(prompt_lens, block_sizes, budgets, windows)
def test_window_lies_inside_the_tail(
    prompt_len: int, block_size: int, budget: int | float, window: int
) -> None:
    planned = plan(prompt_len, block_size, make(budget, window))
    if planned is None:
        return
    tail = prompt_len - planned.tail_start * block_size
    assert window <= tail < window + block_size


@many
@given(prompt_lens, block_sizes, budgets, budgets, windows)
def test_larger_budget_never_retains_less(
    prompt_len: int, block_size: int, one: int | float, other: int | float, window: int
) -> None:
    configs = sorted(
        (make(one, window), make(other, window)), key=lambda c: budget_entries(prompt_len, c)
    )
    smaller, larger = (retained(prompt_len, block_size, config) for config in configs)
    assert smaller <= larger


@many
@given(prompt_lens, block_sizes, budgets, windows)
def test_no_plan_exactly_when_nothing_would_be_freed(
    prompt_len: int, block_size: int, budget: int | float, window: int
) -> None:
    config = make(budget, window)
    # By search: the fewest whole blocks before the tail, at least one, that meet the budget.
    tail_start = max(0, (prompt_len - window) // block_size)
    tail = prompt_len - tail_start * block_size
    packed = 1
    while packed * block_size + tail < budget_entries(prompt_len, config):
        packed += 1
    frees = packed < tail_start
    expected = RetentionPlan(tail_start - packed, packed, tail_start) if frees else None
    assert plan(prompt_len, block_size, config) == expected


@given(prompt_lens, block_sizes, budgets)
def test_disabled_eviction_plans_nothing(
    prompt_len: int, block_size: int, budget: int | float
) -> None:
    config = EvictionConfig.parse({"method": "none", "budget": budget})
    assert plan(prompt_len, block_size, config) is None


@pytest.mark.parametrize(
    ("prompt_len", "block_size", "budget", "window", "expected"),
    [
        (1556, 32, 256, 32, RetentionPlan(40, 7, 47)),
        (1000, 16, 128, 32, RetentionPlan(54, 6, 60)),
        (96, 32, 1, 32, RetentionPlan(1, 1, 2)),
        (95, 32, 1, 32, None),
        (10, 32, 1, 32, None),
        (1000, 32, 1.0, 32, None),
        (1000, 32, 4096, 32, None),
    ],
)
def test_known_plans(
    prompt_len: int, block_size: int, budget: int | float, window: int, expected: object
) -> None:
    assert plan(prompt_len, block_size, make(budget, window)) == expected


@many
@given(prompt_lens, st.floats(0.001, 1.0))
def test_fraction_is_rounded_up(prompt_len: int, fraction: float) -> None:
    entries = budget_entries(prompt_len, make(fraction, 32))
    exact = Fraction(fraction) * prompt_len
    # The product is rounded to binary, so it may end on either side of a whole number.
    assert exact - Fraction(1, 10**6) <= entries < exact + 1 + Fraction(1, 10**6)
