from fractions import Fraction
from itertools import pairwise
from math import floor, nextafter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.strategies import few, kv_heads, many, seeds, tied_scores
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels.base import Allocator
from vllm_kvselect.selecting.allocation import (
    adaptive_pages,
    pyramid_blocks,
    shared_pages,
    uniform_pages,
)

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


def pages_of(
    allocator: Allocator,
    scores: oracle.Matrix | torch.Tensor,
    packed: int,
    block_size: int,
    **parameters: Any,
) -> list[int]:
    """Pages of the heads of one segment."""
    segment = torch.as_tensor(scores, dtype=torch.float32)[None]
    pages = allocator(
        segment, [packed], block_size, EvictionConfig.parse({"method": "adakv", **parameters})
    )
    assert pages.dtype == torch.int64
    assert pages.shape == segment.shape[:2]
    (of_heads,) = pages.tolist()
    return list(of_heads)


def adaptive(scores: oracle.Matrix, packed: int, block_size: int, safeguard: float) -> list[int]:
    return pages_of(adaptive_pages, scores, packed, block_size, safeguard=safeguard)


@many
@given(allocations())
def test_adaptive_pages_equal_the_oracle(case: tuple[list[list[int]], int, int, float]) -> None:
    assert adaptive(*case) == oracle.adaptive_pages(*case)


@many
@given(allocations())
def test_pages_are_conserved_and_fit_the_tokens(
    case: tuple[list[list[int]], int, int, float],
) -> None:
    scores, num_packed, block_size, _ = case
    pages = adaptive(*case)
    assert sum(pages) == num_packed * len(scores)
    assert all(0 <= page <= len(scores[0]) // block_size for page in pages)


@many
@given(allocations())
def test_pages_stay_within_one_of_the_exact_blend(
    case: tuple[list[list[int]], int, int, float],
) -> None:
    scores, num_packed, block_size, safeguard = case
    even = num_packed * block_size
    # The configured safeguard, not the rounded one: off by 2**-17 times the entries it moves.
    slack = Fraction(even * len(scores), 2**17 * block_size)
    entries = [(-s, t, head) for head, row in enumerate(scores) for t, s in enumerate(row)]
    best = [head for _, _, head in sorted(entries)[: even * len(scores)]]
    for head, pages in enumerate(adaptive(*case)):
        blend = Fraction(safeguard) * even + (1 - Fraction(safeguard)) * best.count(head)
        assert abs(pages - blend / block_size) < 1 + slack


@many
@given(allocations())
def test_the_floor_is_respected_up_to_page_rounding(
    case: tuple[list[list[int]], int, int, float],
) -> None:
    _, num_packed, _, safeguard = case
    share = Fraction(round(safeguard * 2**16), 2**16)
    assert min(adaptive(*case)) >= floor(share * num_packed)


@many
@given(allocations())
def test_a_safeguard_of_one_is_even(case: tuple[list[list[int]], int, int, float]) -> None:
    scores, num_packed, block_size, _ = case
    assert adaptive(scores, num_packed, block_size, 1.0) == [num_packed] * len(scores)
    assert pages_of(uniform_pages, scores, num_packed, block_size) == [num_packed] * len(scores)


@many
@given(allocations())
def test_a_minimum_equals_the_oracle_and_is_kept(
    case: tuple[list[list[int]], int, int, float],
) -> None:
    scores, num_packed, block_size, safeguard = case
    floor = {"safeguard": safeguard, "floor": "minimum"}
    pages = pages_of(adaptive_pages, scores, num_packed, block_size, **floor)
    assert pages == oracle.adaptive_pages(*case, "minimum")
    assert sum(pages) == num_packed * len(scores)
    least = int(safeguard * num_packed * block_size)
    assert min(pages) >= least // block_size
    assert max(pages) <= len(scores[0]) // block_size


@few
@given(st.lists(st.tuples(st.integers(1, 4), seeds), min_size=1, max_size=4), kv_heads)
def test_segments_know_nothing_of_each_other(
    segments: list[tuple[int, int]], num_heads: int
) -> None:
    """Each has packed blocks of its own, as the layers of a pyramid."""
    num_packed = [packed for packed, _ in segments]
    scores = torch.stack([tied(seed, num_heads, 4 * 8) for _, seed in segments])
    for allocator in (uniform_pages, adaptive_pages, shared_pages):
        for kind in ("blend", "minimum"):
            pages = allocator(
                scores,
                num_packed,
                8,
                EvictionConfig.parse({"method": "adakv-perturb", "floor": kind}),
            )
            alone = [
                pages_of(allocator, segment, packed, 8, floor=kind)
                for segment, packed in zip(scores, num_packed, strict=True)
            ]
            assert pages.tolist() == alone


def tied(seed: int, *shape: int) -> torch.Tensor:
    """A few different scores."""
    return torch.randint(4, shape, generator=torch.Generator().manual_seed(seed)).float()


@many
@given(allocations())
def test_shared_pages_have_no_floor(case: tuple[list[list[int]], int, int, float]) -> None:
    scores, num_packed, block_size, _ = case
    pages = pages_of(shared_pages, scores, num_packed, block_size)
    assert pages == adaptive(scores, num_packed, block_size, 0.0)


def test_a_minimum_leaves_more_to_the_rich_than_a_blend() -> None:
    """A blend moves only the part above the floor; a minimum binds poor heads alone."""
    scores = [[0] * 64, [1] * 16 + [0] * 48, [1] * 64]  # 16, 16 and 64 of the best 96
    blend, minimum = (
        pages_of(adaptive_pages, scores, 4, 8, safeguard=0.5, floor=floor)
        for floor in ("blend", "minimum")
    )
    assert blend == [3, 3, 6]
    assert minimum == [2, 2, 8]


layer_splits = st.tuples(st.integers(1, 30), st.integers(1, 40), st.integers(1, 30)).map(
    lambda drawn: (drawn[0], drawn[1], drawn[0] + drawn[2])
)
"""Packed blocks, layers, and more blocks before the tail than are packed."""


@many
@given(layer_splits, st.integers(1, 50))
def test_a_pyramid_equals_the_oracle(split: tuple[int, int, int], beta: int) -> None:
    assert pyramid_blocks(
        *split, EvictionConfig(method="adakv-perturb", beta=beta)
    ) == oracle.pyramid_blocks(*split, beta)


@many
@given(layer_splits, st.integers(1, 50))
def test_a_pyramid_falls_within_its_bounds(split: tuple[int, int, int], beta: int) -> None:
    num_packed, num_layers, num_blocks = split
    blocks = pyramid_blocks(*split, EvictionConfig(method="adakv-perturb", beta=beta))
    assert sum(blocks) == num_packed * num_layers
    assert all(1 <= count <= num_blocks for count in blocks)
    assert blocks == sorted(blocks, reverse=True)
    steps = [above - below for above, below in pairwise(blocks)]
    assert not steps or max(steps) - min(steps) <= 2  # linear, but for rounding


def test_pyramids_of_the_paper() -> None:
    config = EvictionConfig(method="adakv-perturb")
    assert pyramid_blocks(20, 5, 100, config) == [39, 30, 20, 10, 1]  # 39 to 20 / beta
    assert pyramid_blocks(20, 5, 30, config) == [30, 25, 20, 15, 10]  # no more than there are
    assert pyramid_blocks(20, 5, 100, EvictionConfig(method="adakv-perturb", beta=1)) == [20] * 5
    assert pyramid_blocks(1, 5, 100, config) == [1] * 5


@pytest.mark.parametrize("score", [0.0, 0.25])
def test_equal_heads_get_equal_pages(score: float) -> None:
    assert adaptive([[score] * 64] * 4, 2, 8, 0.0) == [2, 2, 2, 2]


def test_one_head_may_take_all_that_the_safeguard_leaves() -> None:
    scores = [[0] * 64, [1] * 64]
    assert adaptive(scores, 4, 8, 0.0) == [0, 8]
    assert adaptive(scores, 4, 8, 0.5) == [2, 6]


def test_the_safeguard_is_rounded_to_the_nearest_fraction() -> None:
    """Quotas of 1.5 and 2.5 pages at a safeguard of 0.5: the lower head gets the odd page."""
    scores = [[1] * 8 + [0] * 24, [1] * 24 + [0] * 8]
    for safeguard in (nextafter(0.5, 0.0), 0.5, nextafter(0.5, 1.0)):
        assert adaptive(scores, 2, 8, safeguard) == [2, 2]


def test_strided_scores_are_read_by_head() -> None:
    scores = torch.zeros(40, 2, dtype=torch.float32)
    scores[:, 1] = 1
    assert pages_of(adaptive_pages, scores.t()[:, :32], 2, 8, safeguard=0.0) == [0, 4]


@pytest.mark.parametrize("num_bad", [1, 20, 64])
def test_the_sum_is_exact_even_for_scores_that_are_not_numbers(num_bad: int) -> None:
    """A broken model must not break the blocks' bookkeeping: other requests share the pool."""
    scores = torch.rand(3, 64, generator=torch.Generator().manual_seed(0))
    scores[1, :num_bad] = torch.nan
    pages = pages_of(adaptive_pages, scores, 3, 8)
    assert sum(pages) == 9
    assert min(pages) >= 0
    assert max(pages) <= 8
