from math import expm1, fsum

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.strategies import Layer, Shape, few, random_layer, scoring_inputs, seeds, shapes, some
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.snapkv import snapkv_scores, window_attention

kernel_sizes = st.sampled_from((1, 3, 7, 101))
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def relative_bound(layer: Layer, scale: float, unit: float, num_rows: int) -> float:
    """Largest relative error of a score computed with unit roundoff `unit`, whatever the order.

    Inputs convert exactly. A logit takes one rounding of `scale * q` and a dot product of
    `head_size` terms, so it is off by at most
        d = gamma(head_size + 1) * |scale| * max_ij sum_c |q_ic k_jc|,  gamma(n) = n u / (1 - n u).
    The shift by the row's largest logit cancels in the softmax up to the rounding of the
    difference, u * r, where r is the spread of the logits, at most twice the largest of them. exp
    is taken to be within 2 ulp, 4 u. So numerator and each term of the denominator are off by a
    factor within exp(+-(d + u r + 4 u)), the sum of `num_tokens` positive terms by another
    exp(+-num_tokens u), the quotient by u, the mean of `num_rows` positive rows by
    (num_rows + 1) u. Pooling picks one of the values and adds nothing. With two units to spare for
    the second order:
        |error| / score <= exp(2 (d + u r + 4 u) + (num_tokens + num_rows + 4) u) - 1.
    A sink is one more logit in the spread and one more term of the sum, and has no error itself.
    """
    query, key = layer.query.double(), layer.key.double()
    head_size, num_tokens = query.shape[-1], key.shape[1] + 1
    largest = scale * max(
        fsum(abs(a * b) for a, b in zip(q, k, strict=True))
        for head, keys in enumerate(key.tolist())
        for k in keys
        for q in query.chunk(key.shape[0], dim=1)[head].flatten(0, 1).tolist()
    )
    spread = largest
    if layer.sinks is not None:
        spread = max(largest, float(layer.sinks.abs().max()))
    terms = head_size + 1
    logit = terms * unit / (1 - terms * unit) * largest
    factor = 2 * (logit + unit * 2 * spread + 4 * unit)
    return expm1(factor + (num_tokens + num_rows + 4) * unit)


def check_scores(
    shape: Shape, seed: int, kernel_size: int, dtype: torch.dtype, with_sinks: bool
) -> float:
    """Compares with the oracle and returns the bound."""
    layer = random_layer(shape, seed, dtype, with_sinks=with_sinks)
    config = EvictionConfig(method="adakv-perturb", kernel_size=kernel_size)
    scores = snapkv_scores(
        scoring_inputs(layer.query, layer.key, shape.scale, sinks=layer.sinks), config
    )
    assert scores.dtype == torch.promote_types(dtype, torch.float32)
    assert scores.shape == (shape.num_kv_heads, shape.num_prompt_tokens - shape.window)
    sinks = None if layer.sinks is None else layer.sinks.tolist()
    expected = oracle.snapkv_scores(
        layer.query.tolist(), layer.key.tolist(), shape.scale, kernel_size, sinks=sinks
    )
    unit, num_rows = UNIT_ROUNDOFF[scores.dtype], shape.window * shape.group
    bound = relative_bound(layer, shape.scale, unit, num_rows)
    reference = torch.tensor(expected, dtype=torch.float64)
    error = (scores.double() - reference).abs()
    # Below the smallest normal number roundoff is absolute.
    assert (error <= bound * reference + torch.finfo(scores.dtype).tiny).all()
    return bound


@some
@given(shapes(max_tokens=64), seeds, kernel_sizes, st.booleans())
def test_scores_in_float64_equal_the_oracle(
    shape: Shape, seed: int, kernel_size: int, with_sinks: bool
) -> None:
    assert check_scores(shape, seed, kernel_size, torch.float64, with_sinks) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@few
@given(shape=shapes(max_tokens=64), seed=seeds, with_sinks=st.booleans())
def test_scores_accumulate_in_float32(
    dtype: torch.dtype, shape: Shape, seed: int, with_sinks: bool
) -> None:
    assert check_scores(shape, seed, 7, dtype, with_sinks) < 1e-3


@few
@given(shapes(max_tokens=32), seeds, st.booleans())
def test_attention_weights_row_by_row(shape: Shape, seed: int, with_sinks: bool) -> None:
    layer = random_layer(shape, seed, with_sinks=with_sinks)
    inputs = scoring_inputs(layer.query, layer.key, shape.scale, sinks=layer.sinks)
    sinks = None if layer.sinks is None else layer.sinks.tolist()
    expected = oracle.window_attention(layer.query.tolist(), layer.key.tolist(), shape.scale, sinks)
    reference = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(window_attention(inputs), reference, rtol=1e-12, atol=1e-300)
