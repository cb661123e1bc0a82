from math import nextafter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.strategies import kv_heads, many, tied_scores
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.selecting.allocation import adaptive_pages, pyramid_blocks

small_blocks = st.sampled_from((1, 4, 8, 16))
safeguards = st.one_of(st.sampled_from((0.0, 0.2, 0.5, 1.0)), st.floats(0.0, 1.0))


@st.composite
def allocations(draw: st.DrawFn) -> tuple[list[list[int]], int, int, float]:
    """Scores with ties, packed blocks, block size and safeguard."""
    num_heads, block_size = draw(kv_heads), draw(small_blocks)
    num_blocks = draw(st.integers(1, 8))
    num_packed = draw(st.integers(1, num_blocks))
    scores = draw(tied_scores(num_heads, num_blocks * block_size))
    return scores, num_packed, block_size, draw(safeguards)


def adaptive(
    scores: oracle.Matrix, packed: int, block_size: int, safeguard: float, floor: str = "blend"
) -> list[int]:
    """Pages of the heads of one segment."""
    segment = torch.as_tensor(scores, dtype=torch.float32)[None]
    values = {"method": "adakv", "safeguard": safeguard, "floor": floor}
    pages = adaptive_pages(segment, [packed], block_size, EvictionConfig.parse(values))
    assert pages.dtype == torch.int64
    (of_heads,) = pages.tolist()
    return list(of_heads)


@pytest.mark.parametrize("floor", ["blend", "minimum"])
@many
@given(case=allocations())
def test_adaptive_pages_equal_the_oracle_and_are_conserved(
    floor: str, case: tuple[list[list[int]], int, int, float]
) -> None:
    scores, num_packed, block_size, safeguard = case
    pages = adaptive(*case, floor)
    assert pages == oracle.adaptive_pages(*case, floor)
    assert sum(pages) == num_packed * len(scores)
    assert max(pages) <= len(scores[0]) // block_size
    assert min(pages) >= int(safeguard * num_packed * block_size) // block_size


def test_a_minimum_leaves_more_to_the_rich_than_a_blend() -> None:
    """A blend moves only the part above the floor; a minimum binds poor heads alone."""
    scores = [[0] * 64, [1] * 16 + [0] * 48, [1] * 64]  # 16, 16 and 64 of the best 96
    assert adaptive(scores, 4, 8, 0.5, "blend") == [3, 3, 6]
    assert adaptive(scores, 4, 8, 0.5, "minimum") == [2, 2, 8]


layer_splits = st.tuples(st.integers(1, 30), st.integers(1, 40), st.integers(1, 30)).map(
    lambda drawn: (drawn[0], drawn[1], drawn[0] + drawn[2])
)
"""Packed blocks, layers, and more blocks before the tail than are packed."""


@many
@given(layer_splits, st.integers(1, 50))
def test_a_pyramid_equals_the_oracle(split: tuple[int, int, int], beta: int) -> None:
    blocks = pyramid_blocks(*split, EvictionConfig(method="pyramidkv", beta=beta))
    assert blocks == oracle.pyramid_blocks(*split, beta)
    num_packed, num_layers, num_blocks = split
    assert sum(blocks) == num_packed * num_layers
    assert 1 <= min(blocks) <= max(blocks) <= num_blocks


def test_pyramids_of_the_paper() -> None:
    config = EvictionConfig(method="adakv-perturb")
    assert pyramid_blocks(20, 5, 100, config) == [39, 30, 20, 10, 1]  # 39 to 20 / beta
    assert pyramid_blocks(20, 5, 30, config) == [30, 25, 20, 15, 10]  # no more than there are
    assert pyramid_blocks(20, 5, 100, EvictionConfig(method="adakv-perturb", beta=1)) == [20] * 5
    assert pyramid_blocks(1, 5, 100, config) == [1] * 5


def test_the_safeguard_is_rounded_to_the_nearest_fraction() -> None:
    """Quotas of 1.5 and 2.5 pages at a safeguard of 0.5: the lower head gets the odd page."""
    scores = [[1] * 8 + [0] * 24, [1] * 24 + [0] * 8]
    for safeguard in (nextafter(0.5, 0.0), 0.5, nextafter(0.5, 1.0)):
        assert adaptive(scores, 2, 8, safeguard) == [2, 2]
