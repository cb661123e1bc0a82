"""Which blocks are chosen, and the pages that they are."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle import prefill as oracle
from tests.strategies import kv_heads, seeds, some
from vllm_kvselect.prefilling.blocks import ChosenBlocks, most_critical, segment_pages


def random_shares(
    seed: int, num_before: list[int], num_kv_heads: int, num_blocks: int
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Wide enough that most shares vanish.
    logits = torch.randn(len(num_before), num_kv_heads, num_blocks, generator=generator) * 40
    is_behind = torch.arange(num_blocks) >= torch.tensor(num_before)[:, None, None]
    return logits.masked_fill(is_behind, -torch.inf).softmax(-1)


def sets_of(chosen: ChosenBlocks) -> list[list[set[int]]]:
    found = []
    for indices, counts in zip(chosen.indices.tolist(), chosen.counts.tolist(), strict=True):
        found.append([])
        for row, count in zip(indices, counts, strict=True):
            assert row[:count] == sorted(set(row[:count]))
            found[-1].append(set(row[:count]))
    return found


borders = st.lists(st.integers(1, 12), min_size=1, max_size=4).map(sorted)


@some
@given(seed=seeds, num_before=borders, num_kv_heads=kv_heads, count=st.integers(1, 14))
def test_the_most_critical_blocks_are_read(
    seed: int, num_before: list[int], num_kv_heads: int, count: int
) -> None:
    num_blocks = num_before[-1]
    shares = random_shares(seed, num_before, num_kv_heads, num_blocks)
    chosen = sets_of(most_critical(shares, torch.tensor(num_before), count))
    for segment, before in enumerate(num_before):
        for head in range(num_kv_heads):
            row = shares[segment, head, :before].tolist()
            found = chosen[segment][head]
            assert found <= set(range(before))
            # Shares that vanish are equal: any of them may be taken.
            expected = oracle.most_critical(row, count)
            assert sorted(row[b] for b in found) == sorted(row[b] for b in expected)


@some
@given(
    data=st.data(),
    num_kv_heads=kv_heads,
    pages_per_block=st.integers(1, 3),
    blocks_per_segment=st.integers(1, 3),
    num_segments=st.integers(1, 3),
)
def test_pages_are_the_chosen_ones_and_then_the_segments_own(
    data: st.DataObject,
    num_kv_heads: int,
    pages_per_block: int,
    blocks_per_segment: int,
    num_segments: int,
) -> None:
    num_own = pages_per_block * blocks_per_segment
    own_starts = [num_own * (1 + segment) for segment in range(num_segments)]
    block_ids = data.draw(st.permutations(range(1, 1 + own_starts[-1] + num_own)))
    picked = [
        [
            data.draw(st.sets(st.integers(0, start // pages_per_block - 1), min_size=1))
            for _ in range(num_kv_heads)
        ]
        for start in own_starts
    ]
    most = max(len(blocks) for heads in picked for blocks in heads)
    rows = [[[*sorted(b), *[99] * (most - len(b))] for b in heads] for heads in picked]
    counts = torch.tensor([[len(blocks) for blocks in heads] for heads in picked])
    pages, num_chosen = segment_pages(
        ChosenBlocks(torch.tensor(rows), counts),
        torch.tensor(block_ids),
        torch.tensor(own_starts),
        num_own,
        pages_per_block,
    )
    sequence = 0
    for start, heads in zip(own_starts, picked, strict=True):
        for head, blocks in enumerate(heads):
            expected = [
                b * pages_per_block + i for b in sorted(blocks) for i in range(pages_per_block)
            ]
            assert num_chosen[sequence] == len(expected)
            expected += range(start, start + num_own)
            ids = [block_ids[index] * num_kv_heads + head for index in expected]
            ids += [0] * (pages.shape[1] - len(ids))
            assert pages[sequence].tolist() == ids
            sequence += 1
