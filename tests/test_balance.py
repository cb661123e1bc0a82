"""A model of how attention's work is shared out: what the order of sequences is worth.

FlashAttention 3 cuts the sequences of a call so that each of the card's multiprocessors gets about
one piece in ten more than its share, and hands the pieces out in order, each to the first that is
idle. Time is counted in tiles of 128 entries. Run as a module, it prints the numbers.
"""

import heapq
import random
import sys
from collections.abc import Sequence
from statistics import mean

import pytest
import torch

from tests import oracle
from vllm_kvselect.paging.order import Orders, longest_first

TILE, NUM_PROCESSORS, MOST_PIECES = 128, 132, 32
NUM_HEADS, BLOCK_SIZE, NUM_PACKED = 8, 16, 127
BETWEEN = 0.5
"""Tiles that the way from one piece to the next is counted as."""


def offsets(num_rows: int, spread: float, seed: int) -> torch.Tensor:
    """Of one layer, whose heads share a row's blocks log-normally, `[1, num_rows, heads + 1]`."""
    draw, rows = random.Random(seed), []
    for _ in range(num_rows):
        shares = torch.tensor([draw.gauss(0, spread) for _ in range(NUM_HEADS)]).exp()
        ends = (shares.cumsum(0) / shares.sum() * NUM_PACKED * NUM_HEADS).round()
        rows.append(torch.nn.functional.pad(ends, (1, 0)).int())
    return torch.stack(rows)[None]


def tiles_until_the_last_ends(lengths: Sequence[int]) -> float:
    """What the last multiprocessor is idle after, for sequences in this order."""
    tiles = [-(-length // TILE) for length in lengths]
    ends = [0.0] * NUM_PROCESSORS
    pieces = oracle.parts(tiles, NUM_PROCESSORS, MOST_PIECES)
    for num_tiles, num_pieces in zip(tiles, pieces, strict=True):
        size = -(-num_tiles // num_pieces)
        for begin in range(0, num_tiles, size):
            piece = min(size, num_tiles - begin)
            heapq.heapreplace(ends, ends[0] + piece + BETWEEN)
    return max(ends)


def before_and_after(num_rows: int, spread: float) -> tuple[float, float]:
    """Means of both over some draws: in the order of the batch, and longest first."""
    found = []
    for seed in range(8):
        of_layer, num_sequences = offsets(num_rows, spread, seed), num_rows * NUM_HEADS
        tail_start = torch.full((num_rows,), NUM_PACKED)
        seq_lens = tail_start * BLOCK_SIZE + 1
        places = torch.zeros(1, num_sequences + 1, dtype=torch.int32)
        orders = Orders(places, torch.zeros(1, num_sequences, dtype=torch.int32))
        longest_first(seq_lens, tail_start, of_layer, BLOCK_SIZE, orders)
        in_order = (of_layer[0].diff().flatten() * BLOCK_SIZE + 1).tolist()
        both = in_order, orders.seq_lens[0].tolist()
        found.append([tiles_until_the_last_ends(lengths) for lengths in both])
    before, after = zip(*found, strict=True)
    return mean(before), mean(after)


@pytest.mark.parametrize("num_rows", [16, 64])
def test_uneven_heads_end_nearly_when_even_ones_do(num_rows: int) -> None:
    even, unmoved = before_and_after(num_rows, 0.0)
    before, after = before_and_after(num_rows, 1.0)
    assert even == unmoved
    assert before > 1.5 * even
    assert after < 1.25 * even


if __name__ == "__main__":
    for rows in (16, 64):
        for name, spread in (("even", 0.0), ("uneven", 1.0)):
            before, after = before_and_after(rows, spread)
            sys.stdout.write(f"{rows} rows, {name}: {before:.1f}, longest first {after:.1f}\n")
