"""What the estimate says, against loops in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle import prefill as oracle
from tests.strategies import few, groups, head_sizes, kv_heads, seeds
from vllm_kvselect.prefilling.criticality import criticality, extremes, fused


def random_vectors(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@few
@given(
    seed=seeds,
    num_kv_heads=kv_heads,
    group=groups,
    head_size=head_sizes,
    num_segments=st.integers(2, 4),
    blocks_per_segment=st.integers(1, 3),
)
def test_criticality_is_the_oracles(
    seed: int,
    num_kv_heads: int,
    group: int,
    head_size: int,
    num_segments: int,
    blocks_per_segment: int,
) -> None:
    block, scale = 4, head_size**-0.5
    size = block * blocks_per_segment
    num_tokens = size * num_segments
    query = random_vectors(seed, num_kv_heads * group, num_tokens, head_size).float()
    key = random_vectors(seed + 1, num_kv_heads, num_tokens, head_size).float()
    num_before = torch.arange(1, num_segments) * blocks_per_segment
    found = criticality(
        extremes(query[:, size:], size), extremes(key[:, :-size], block), scale, num_before
    )
    assert found.dtype == torch.float32
    for head in range(num_kv_heads):
        own = query[head * group : (head + 1) * group].double().tolist()
        expected = oracle.critical(own, key[head].double().tolist(), size, block, scale)
        for segment in range(1, num_segments):
            shares = found[segment - 1, head].tolist()
            assert shares == pytest.approx(
                expected[segment] + [0.0] * (len(shares) - len(expected[segment])), abs=1e-5
            )


def test_extremes_keep_the_dtype() -> None:
    vectors = random_vectors(0, 2, 12, 8).bfloat16()
    largest, smallest = extremes(vectors, 4)
    assert largest.dtype == smallest.dtype == torch.bfloat16
    assert torch.equal(largest[1, 2], vectors[1, 8:].amax(0))
    assert torch.equal(smallest[0, 0], vectors[0, :4].amin(0))


def test_layers_are_smoothed_one_after_the_other() -> None:
    layers = random_vectors(0, 3, 2, 1, 5)
    found = None
    for current in layers:
        found = fused(current, found, 0.25)
    expected = 0.0625 * layers[0] + 0.1875 * layers[1] + 0.75 * layers[2]
    assert found is not None
    torch.testing.assert_close(found, expected)
