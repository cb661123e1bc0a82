"""Pruning is exact: the same entries are retained as with every norm, and fewer are computed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import strategies
from tests.two_stages import select_perturbation
from vllm_kvselect.scoring.value_norms import OutputProjection, value_norms
from vllm_kvselect.selecting.pruning import needed_value_norms, norm_bounds, select_pruned
from vllm_kvselect.selecting.selection import best_mask, stage_1_counts

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def layer(
    seed: int, heads: int, group: int, size: int, num_tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, OutputProjection]:
    """Values and W_O with directions of very different strength, as real ones have."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(heads, num_tokens, size, generator=generator)
    weight = torch.randn(heads, size, group, 40, generator=generator)
    strength = torch.rand(heads, size, 1, 1, generator=generator) ** 6
    return value.to(dtype), OutputProjection.of((weight * strength).to(dtype))


@strategies.many
@given(
    seed=strategies.seeds,
    heads=strategies.kv_heads,
    group=strategies.groups,
    size=strategies.head_sizes,
    num_tokens=st.integers(1, 80),
    dtype=st.sampled_from(DTYPES),
    alpha=st.sampled_from((0.0, 0.25, 0.5, 1.0)),
    eps=st.sampled_from((0.0, 1e-4, 1.0)),
    tied=st.booleans(),
    data=st.data(),
)
def test_pruned_norms_retain_what_all_norms_retain(
    seed: int,
    heads: int,
    group: int,
    size: int,
    num_tokens: int,
    dtype: torch.dtype,
    alpha: float,
    eps: float,
    tied: bool,
    data: st.DataObject,
) -> None:
    value, projection = layer(seed, heads, group, size, num_tokens, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    scores = torch.rand(heads, num_tokens, generator=torch.Generator().manual_seed(seed)).to(wide)
    if tied:
        scores = (scores * 4).round()
    budgets = torch.tensor(
        data.draw(st.lists(st.integers(0, num_tokens), min_size=heads, max_size=heads))
    )
    total = int(budgets.sum())
    of_stage_1 = stage_1_counts(budgets, alpha)
    stage_1 = best_mask(scores, of_stage_1)
    norms = needed_value_norms(scores, value, projection, stage_1, budgets, eps)
    every = value_norms(value, projection.weight).to(wide)
    # Rows of a product may be summed in another order when fewer are computed at once.
    computed = norms != 0
    torch.testing.assert_close(norms[computed], every[computed], rtol=2**-6, atol=0)
    exact = torch.where(computed, norms, every)
    pruned = select_perturbation(scores, norms, budgets, total, alpha, eps)
    assert torch.equal(pruned, select_perturbation(scores, exact, budgets, total, alpha, eps))
    arguments = (scores, scores, value, projection, budgets, total, of_stage_1, eps)
    assert torch.equal(select_pruned(*arguments), pruned)


@strategies.many
@given(
    seed=strategies.seeds,
    heads=strategies.kv_heads,
    group=strategies.groups,
    size=strategies.head_sizes,
    dtype=st.sampled_from(DTYPES),
)
def test_bounds_are_never_below_the_norms(
    seed: int, heads: int, group: int, size: int, dtype: torch.dtype
) -> None:
    value, projection = layer(seed, heads, group, size, 50, dtype)
    value[:, 10] = 0
    assert (norm_bounds(value, projection) >= value_norms(value, projection.weight)).all()


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_bound_is_reached_by_a_projection_with_equal_outputs(dtype: torch.dtype) -> None:
    weight = torch.ones(1, 4, 2, 64, dtype=dtype)
    value = torch.randn(1, 30, 4).to(dtype)
    projection = OutputProjection.of(weight)
    assert (norm_bounds(value, projection) <= value_norms(value, weight) * 1.001 + 0.5).all()


def test_most_norms_are_not_computed() -> None:
    value, projection = layer(0, 3, 3, 64, 1440, torch.float32)
    scores = torch.rand(3, 1440, generator=torch.Generator().manual_seed(0)) ** 4
    budgets = torch.tensor([224] * 3)
    stage_1 = best_mask(scores, budgets // 2)
    norms = needed_value_norms(scores, value, projection, stage_1, budgets, 1e-4)
    assert (norms != 0).sum() < 0.5 * norms.numel()


def test_bounds_of_large_float16_values_stay_finite() -> None:
    value, projection = layer(0, 2, 2, 64, 50, torch.float16)
    value *= 30
    bounds = norm_bounds(value, projection)
    assert bounds.isfinite().all()
    assert (bounds >= value_norms(value, projection.weight)).all()


def test_entries_behind_looser_bounds_are_projected_too() -> None:
    # Ten values whose output is one channel of 2: norm 2, bound 12.6. The last one's is 0.25 in all
    # 40 channels: norm and bound 10. It has the worst bound and must still be retained.
    weight = torch.zeros(1, 2, 1, 40)
    weight[0, 0, 0, 0], weight[0, 1] = 2.0, 0.25
    value = torch.tensor([[[1.0, 0.0]] * 10 + [[0.0, 1.0]]])
    scores, budgets = torch.ones(1, 11), torch.tensor([1])
    stage_1 = best_mask(scores, torch.zeros_like(budgets))
    norms = needed_value_norms(scores, value, OutputProjection.of(weight), stage_1, budgets, 0.0)
    assert select_perturbation(scores, norms, budgets, 1, 0.0, 0.0).tolist() == [10]
