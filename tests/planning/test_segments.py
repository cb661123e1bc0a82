"""Which tokens of a prompt are sparse."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import many
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.planning.cuts import Cuts, cuts
from vllm_kvselect.planning.segments import Segments, sparse_segments


def segments_of(num_tokens: int, **values: Any) -> Segments | None:
    config = EvictionConfig.parse({"method": "none", "prefill": "critiprefill", **values})
    return sparse_segments(num_tokens, cuts(num_tokens, 32, config), config)


def test_a_dense_prefill_has_none() -> None:
    config = EvictionConfig(method="none")
    assert sparse_segments(100_000, Cuts(), config) is None


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (4639, None),  # the segment that begins at 4,096 holds one of the last 32 tokens
        (4096 + 512 + 32, Segments(512, 4096, 4608)),
        (32 * 1024, Segments(512, 4096, 32 * 1024 - 512)),
        (32 * 1024 + 31, Segments(512, 4096, 32 * 1024 - 512)),
        (32 * 1024 + 32, Segments(512, 4096, 32 * 1024)),
    ],
)
def test_the_defaults_are_the_papers(num_tokens: int, expected: Segments | None) -> None:
    assert segments_of(num_tokens) == expected


def test_a_segment_that_would_read_everything_is_dense() -> None:
    # At 2,048 there are exactly as many tokens before the segment as it may read.
    settings = {"prefill_dense_until": 0, "prefill_budget": 2048}
    assert segments_of(8192, **settings) == Segments(512, 2560, 7680)


def test_the_end_of_a_marked_context_is_dense() -> None:
    settings = {"method": "snapkv", "budget": 0.1, "context": 6000}
    assert segments_of(9000, **settings) == Segments(512, 4096, 5632)
    # Nothing is dropped of it: what counts is the prompt's end.
    assert segments_of(9000, context=6000) == Segments(512, 4096, 8704)


def test_rounds_change_nothing() -> None:
    config = EvictionConfig(method="snapkv", budget=1.0, decode_budget=512, prefill="critiprefill")
    request_cuts = cuts(6000, 32, config, 1000)
    assert request_cuts.first_position > 6000
    assert sparse_segments(6000, request_cuts, config) == Segments(512, 4096, 5632)


@many
@given(
    num_tokens=st.integers(1, 5000),
    size=st.sampled_from((32, 64, 128)),
    dense_until=st.integers(0, 700),
    window=st.integers(1, 200),
    budget=st.integers(1, 20),
)
def test_what_is_sparse_follows_from_the_rules(
    num_tokens: int, size: int, dense_until: int, window: int, budget: int
) -> None:
    config = EvictionConfig(
        method="none",
        prefill="critiprefill",
        prefill_segment=size,
        prefill_dense_until=dense_until,
        prefill_budget=32 * budget,
        window=window,
    )
    segments = sparse_segments(num_tokens, Cuts(), config)
    sparse = [
        start
        for start in range(0, num_tokens, size)
        if start >= max(dense_until, 1)
        and start > 32 * budget
        and start + size <= num_tokens - window
    ]
    if segments is None:
        assert not sparse
    else:
        assert [*segments.sparse_part(0, num_tokens)] == sparse


def test_chunks_end_at_borders_of_sparse_segments() -> None:
    segments = Segments(100, 200, 500)
    assert [segments.last_border(p) for p in (150, 200, 201, 299, 300, 499, 500, 523)] == [
        150, 200, 200, 200, 300, 400, 500, 523,
    ]  # fmt: skip
    assert [*segments.sparse_part(130, 400)] == [200, 300]
    assert [*segments.sparse_part(300, 523)] == [300, 400]
    assert not segments.sparse_part(0, 130)
    assert not segments.sparse_part(500, 523)
    for begin, end in ((0, 250), (250, 500)):
        with pytest.raises(ValueError, match="inside a segment"):
            segments.sparse_part(begin, end)
