"""Blocks have the same name where they are computed alike, and only there."""

import hashlib
from collections.abc import Hashable, Sequence

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import BlockHash

from tests.strategies import many
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.sparse.names import sparse_names
from vllm_kvselect.planning.cuts import Cuts
from vllm_kvselect.planning.segments import sparse_segments

BLOCK_SIZE, SIZE, DENSE_UNTIL = 2, 4, 4
FIELDS = {
    "method": "none",
    "prefill_segment": SIZE,
    "prefill_block": 2,
    "prefill_dense_until": DENSE_UNTIL,
    "window": 1,
}
configs = st.sampled_from(
    [
        EvictionConfig.parse({**FIELDS, "prefill": "dense"}),
        EvictionConfig.parse({**FIELDS, "prefill": "critiprefill", "prefill_budget": 2}),
        EvictionConfig.parse({**FIELDS, "prefill": "critiprefill", "prefill_budget": 4}),
    ]
)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=18)


def plain_hashes(prompt: Sequence[int]) -> list[BlockHash]:
    """A hash of each full block and all before it."""
    ends = range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)
    return [BlockHash(hashlib.sha256(bytes(prompt[:end])).digest()) for end in ends]


def names(prompt: Sequence[int], config: EvictionConfig) -> list[BlockHash]:
    segments = sparse_segments(len(prompt), Cuts(), config)
    hashes = plain_hashes(prompt)
    return sparse_names(hashes, BLOCK_SIZE, segments, config) if segments else hashes


def causes(prompt: Sequence[int], config: EvictionConfig) -> list[Hashable]:
    """What each full block's keys and values depend on: the settings count once one is sparse."""
    least = max(DENSE_UNTIL, config.prefill_budget + 1)
    sparse = [
        start
        for start in range(0, len(prompt), SIZE)
        if config.prefill == "critiprefill" and start >= least and start + SIZE <= len(prompt) - 1
    ]
    settings = config.prefill_budget
    found: list[Hashable] = []
    for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE):
        tokens = tuple(prompt[:end])
        if not sparse or end <= sparse[0]:
            found.append(tokens)
        elif end <= sparse[-1] + SIZE:
            whole = -(-end // SIZE) * SIZE
            found.append((tokens, tuple(prompt[:whole]), settings))
        else:
            found.append((tokens, sparse[-1], settings))
    return found


@many
@given(first=prompts, other=prompts, num_same=st.integers(0, 18), one=configs, two=configs)
def test_names_say_what_a_block_depends_on(
    first: list[int], other: list[int], num_same: int, one: EvictionConfig, two: EvictionConfig
) -> None:
    other = [*first[:num_same], *other]
    pairs = zip(names(first, one), causes(first, one), strict=True)
    for name, cause in pairs:
        for other_name, other_cause in zip(names(other, two), causes(other, two), strict=True):
            assert (name == other_name) == (cause == other_cause)
