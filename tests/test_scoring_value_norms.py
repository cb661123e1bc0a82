from math import fsum

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.strategies import few, groups, head_sizes, kv_heads, seeds
from vllm_kvselect.scoring import value_norms as module
from vllm_kvselect.scoring.held import stacked
from vllm_kvselect.scoring.value_norms import (
    OutputProjection,
    projected_value_l2_norms,
    side_by_side,
    value_norms,
)

hidden_sizes = st.sampled_from((1, 5, 24, 48))
token_counts = st.integers(1, 24)


def draw_inputs(
    seed: int, heads: int, tokens: int, head_size: int, group: int, hidden: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(heads, tokens, head_size, generator=generator, dtype=torch.float64)
    sizes = (heads, head_size, group, hidden)
    projection = torch.randn(*sizes, generator=generator, dtype=torch.float64)
    return value.to(dtype), projection.to(dtype)


def absolute_bound(
    value: list[float], projection: oracle.Cube, unit: float, unit_stored: float
) -> float:
    """Largest error of one norm, for sums in any order with unit roundoff `unit`.

    A product `(V W_O)_c` is a sum of `head_size` terms, off by gamma(head_size) *
    sum_d |v_d w_dc|, and rounded to the inputs' type, `unit_stored` of itself. abs is exact. The
    sum over `hidden_size` is off by gamma(hidden_size) of itself and is rounded again, then the
    mean over the group in at least float32, gamma(group + 1). One percent is added for the second
    order (the largest unit is 2**-8: its square is 0.4 % of it).
    """
    head_size, group, hidden_size = len(value), len(projection[0]), len(projection[0][0])
    norm, condition = [], []
    for member in range(group):
        for channel in range(hidden_size):
            column = [row[member][channel] for row in projection]
            norm.append(abs(oracle.dot(value, column)))
            condition.append(fsum(abs(a * b) for a, b in zip(value, column, strict=True)))
    roundings = (hidden_size + group + 1) * unit + 2 * unit_stored
    return 1.01 * (head_size * unit * fsum(condition) + roundings * fsum(norm)) / group


# Unit roundoff of the accumulation (at least float32), and of the type that products are stored in.
ROUNDOFF = {
    torch.float64: (2.0**-53, 2.0**-53),
    torch.float32: (2.0**-24, 2.0**-24),
    torch.bfloat16: (2.0**-24, 2.0**-8),
    torch.float16: (2.0**-24, 2.0**-11),
}


@pytest.mark.parametrize("dtype", list(ROUNDOFF))
@few
@given(
    seed=seeds,
    heads=kv_heads,
    tokens=token_counts,
    head_size=head_sizes,
    group=groups,
    hidden=hidden_sizes,
)
def test_norms_equal_the_oracle(
    dtype: torch.dtype, seed: int, heads: int, tokens: int, head_size: int, group: int, hidden: int
) -> None:
    value, projection = draw_inputs(seed, heads, tokens, head_size, group, hidden, dtype)
    norms = value_norms(value, projection)
    assert norms.dtype == torch.promote_types(dtype, torch.float32)
    values, projections = value.tolist(), projection.tolist()
    expected = oracle.value_norms(values, projections)
    for head in range(heads):
        for token in range(tokens):
            error = abs(float(norms[head, token]) - expected[head][token])
            bound = absolute_bound(values[head][token], projections[head], *ROUNDOFF[dtype])
            # Half-precision results below the smallest normal number round absolutely.
            assert error <= bound + hidden * torch.finfo(dtype).tiny
            if dtype == torch.float64:
                assert error <= 1e-12 * max(1.0, expected[head][token])


@pytest.mark.parametrize("dtype", list(ROUNDOFF))
def test_l2_norms_equal_the_oracle(dtype: torch.dtype) -> None:
    value, weight = draw_inputs(3, 2, 20, 16, 3, 24, dtype)
    value[0, 5] = 0
    norms = projected_value_l2_norms(value, OutputProjection.of(weight))
    rows = oracle.value_l2_norms(value.tolist(), weight.tolist())
    expected = torch.tensor(rows, dtype=torch.float64)
    # What is given is widened; the form's sums of products are rounded in what it is widened to.
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    assert norms.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(norms.double(), expected, rtol=1000 * eps, atol=0)


@few
@given(seeds, kv_heads, token_counts, groups, st.integers(1, 30))
def test_blocks_of_tokens_join_without_a_seam(
    seed: int, heads: int, tokens: int, group: int, tokens_per_block: int
) -> None:
    value, projection = draw_inputs(seed, heads, tokens, 8, group, 24, torch.float64)
    whole = value_norms(value, projection)
    with pytest.MonkeyPatch.context() as patch:
        # One row of `V W_O` for all heads is heads * group * 24 float64 numbers.
        patch.setattr(module, "_BLOCK_BYTES", tokens_per_block * heads * group * 24 * 8)
        torch.testing.assert_close(value_norms(value, projection), whole, rtol=1e-13, atol=0)
        patch.setattr(module, "_BLOCK_BYTES", 1)
        torch.testing.assert_close(value_norms(value, projection), whole, rtol=1e-13, atol=0)


def test_no_more_than_a_block_is_alive_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    value, projection = draw_inputs(0, 2, 50, 8, 3, 24, torch.float32)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 7 * 2 * 3 * 24 * 4)
    real, sizes = torch.bmm, []

    def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = real(a, b)
        sizes.append(product.numel() * product.element_size())
        return product

    monkeypatch.setattr(torch, "bmm", bmm)
    value_norms(value, projection)
    assert len(sizes) == 8
    assert max(sizes) <= module._BLOCK_BYTES


@pytest.mark.parametrize("hidden", [512, 4096, 4097])
def test_long_sums_keep_the_documented_accuracy_in_bfloat16(hidden: int) -> None:
    value, projection = draw_inputs(1, 1, 3, 8, 2, hidden, torch.bfloat16)
    norms = value_norms(value, projection).double()
    expected = torch.tensor(
        oracle.value_norms(value.tolist(), projection.tolist()), dtype=torch.float64
    )
    assert ((norms - expected) / expected).abs().max() < 2**-7


def test_large_norms_do_not_overflow_in_float16() -> None:
    """Sums beyond 65504 are common with wide layers; a norm of inf would rank by position only."""
    value, projection = torch.full((1, 2, 8), 8.0), torch.ones(1, 8, 2, 4096)
    norms = value_norms(value.half(), projection.half())
    assert norms.tolist() == [[64.0 * 4096] * 2]


def test_projections_laid_side_by_side_are_stacked_without_a_copy() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 2, 8, 3, 12, generator=generator)
    projections = [OutputProjection.of(weight.clone()) for weight in weights]
    laid = side_by_side(projections)
    for name in ("weight", "bound_form"):
        own, parts = ([getattr(each, name) for each in some] for some in (projections, laid))
        whole = stacked(parts)
        assert torch.equal(whole, torch.stack(own))
        assert whole.data_ptr() == parts[0].data_ptr()
    other = OutputProjection.of(weights[0, :1])
    assert side_by_side([*projections, other])[-1] is other
