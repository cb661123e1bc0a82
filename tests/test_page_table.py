from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.strategies import kv_heads, many
from vllm_kvselect.paging.order import Orders, Schedules, Sharing, longest_first, padded
from vllm_kvselect.paging.page_table import PageTable, headwise_page_table

NUM_BLOCKS = 200


@dataclass
class Batch:
    """Requests of a batch, and each layer's pages per head."""

    block_size: int
    num_kv_heads: int
    blocks: list[list[int]]
    seq_lens: list[int]
    first_packed: list[int]
    tail_start: list[int]
    pages: list[list[list[int]]]  # [layer][request][head]

    def table(self, integers: torch.dtype = torch.int32, layers: slice = slice(None)) -> PageTable:
        """The table under test."""
        return headwise_page_table(*self.inputs(integers, layers))

    def inputs(
        self, integers: torch.dtype = torch.int32, layers: slice = slice(None)
    ) -> tuple[Any, ...]:
        """What a table is built of; unused columns of the block table hold anything."""
        width = max(len(blocks) for blocks in self.blocks) + 2
        stale = [blocks + [987_654_321] * (width - len(blocks)) for blocks in self.blocks]
        # [layer][request][head] -> ends of the runs, counted through the layers of a request
        runs = torch.tensor(self.pages).transpose(0, 1).flatten(1)
        ends = torch.nn.functional.pad(runs.cumsum(-1), (1, 0))
        offsets = ends.unfold(1, self.num_kv_heads + 1, self.num_kv_heads).transpose(0, 1)
        return (
            torch.tensor(stale, dtype=torch.int32),
            torch.tensor(self.seq_lens, dtype=integers),
            torch.tensor(self.first_packed, dtype=integers),
            torch.tensor(self.tail_start, dtype=integers),
            offsets[layers].to(integers),
            self.block_size,
            NUM_BLOCKS,
            layers.start or 0,
        )

    def buffers(self, more: int) -> PageTable:
        """Buffers that were in use, so much wider than need be and for one sequence more."""
        shape = (len(self.pages), len(self.blocks) * self.num_kv_heads + 1)
        width = self.table().pages.shape[2] + more
        return PageTable(
            torch.full((*shape, width), -7, dtype=torch.int32),
            torch.full(shape, -7, dtype=torch.int32),
        )

    def rows(self, layer: int) -> list[oracle.Row]:
        """The oracle's sequences of one layer, requests in order, heads within."""
        return [
            oracle.page_row(
                blocks,
                self.seq_lens[request],
                self.first_packed[request],
                self.tail_start[request],
                [of_layer[request] for of_layer in self.pages],
                layer,
                head,
                self.block_size,
                NUM_BLOCKS,
            )
            for request, blocks in enumerate(self.blocks)
            for head in range(self.num_kv_heads)
        ]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Requests with and without packed blocks, of pools and of single layers; sequence lengths at
    and next to block borders.
    """
    num_kv_heads, block_size = draw(kv_heads), draw(st.sampled_from((1, 4, 16)))
    num_reqs, num_layers = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    batch = Batch(block_size, num_kv_heads, [], [], [], [], [[] for _ in range(num_layers)])
    ids = iter(draw(st.permutations(range(1, 200))))
    for _ in range(num_reqs):
        num_packed = draw(st.integers(0, 5))
        first_packed = draw(st.integers(1, 3)) if num_packed else 0
        tail_start = first_packed + num_packed
        num_tail = draw(st.integers(1, 4))
        in_last = draw(st.sampled_from(sorted({1, min(2, block_size), block_size})))
        # Blocks allocated ahead (for speculative tokens) hold nothing yet.
        num_spare = draw(st.integers(0, 1))
        blocks = [0] * first_packed
        blocks += [next(ids) for _ in range(num_packed + num_tail + num_spare)]
        batch.blocks.append(blocks)
        batch.seq_lens.append((tail_start + num_tail - 1) * block_size + in_last)
        batch.first_packed.append(first_packed)
        batch.tail_start.append(tail_start)
        is_pooled = draw(st.booleans())
        for layers in [batch.pages] if is_pooled else [[layer] for layer in batch.pages]:
            num_pages, size = num_packed * num_kv_heads * len(layers), num_kv_heads * len(layers)
            borders = st.lists(st.integers(0, num_pages), min_size=size - 1, max_size=size - 1)
            cuts = [0, *sorted(draw(borders)), num_pages]
            counts = [end - start for start, end in pairwise(cuts)]
            for index, layer in enumerate(layers):
                layer.append(counts[index * num_kv_heads : (index + 1) * num_kv_heads])
    return batch


@many
@given(batches(), st.sampled_from((torch.int32, torch.int64)))
def test_pages_and_lengths_equal_the_oracle(batch: Batch, integers: torch.dtype) -> None:
    table = batch.table(integers)
    assert table.pages.dtype == table.seq_lens.dtype == torch.int32
    assert table.pages.is_contiguous()
    assert table.seq_lens.is_contiguous()
    for layer in range(len(batch.pages)):
        rows = batch.rows(layer)
        width = table.pages.shape[2]
        assert table.seq_lens[layer].tolist() == [row.num_entries for row in rows]
        assert table.pages[layer].tolist() == [
            row.pages + [0] * (width - len(row.pages)) for row in rows
        ]


@many
@given(batches(), st.integers(0, 3))
def test_buffers_hold_the_same_and_what_is_past_it_stays(batch: Batch, more: int) -> None:
    expected, buffers = batch.table(), batch.buffers(more)
    out = PageTable(*(part[:, :-1] for part in buffers))
    assert headwise_page_table(*batch.inputs(), out) is out
    assert torch.equal(out.seq_lens, expected.seq_lens)
    width = expected.pages.shape[2]
    used = torch.arange(width) * batch.block_size < expected.seq_lens[..., None]
    assert torch.equal(out.pages[..., :width].where(used, 0), expected.pages)
    assert (out.pages[..., :width][~used] == -7).all()
    assert (out.pages[..., width:] == -7).all()
    assert all((part[:, -1] == -7).all() for part in buffers)


sharings = st.builds(
    Sharing, st.integers(1, 20), st.integers(1, 40), st.integers(2, 40), st.integers(2, 3)
)


def orders_of(
    batch: Batch, device: Any = "cpu", more: int = 0, sharing: Sharing | None = None
) -> Orders:
    """Buffers for the orders of a batch, with room for more sequences, that were in use."""
    num_layers, n = len(batch.pages), len(batch.blocks) * batch.num_kv_heads
    shape = 2, num_layers, n + 1 + more
    both = torch.full(shape, -7, dtype=torch.int32, device=device)
    schedules = None
    if sharing is not None:
        size = sharing.size(n)
        numbers = torch.full((num_layers, size + more), -7, dtype=torch.int32, device=device)
        schedules = Schedules(numbers[:, :size], sharing)
    return Orders(both[0, :, : n + 1], both[1, :, :n], schedules)


@many
@given(batches(), sharings)
def test_schedules_share_out_the_sequences_of_each_layer(batch: Batch, sharing: Sharing) -> None:
    orders = orders_of(batch, sharing=sharing)
    assert orders.schedules is not None
    *tensors, block_size, _, _ = batch.inputs()
    longest_first(*(tensors[part] for part in (1, 3, 4)), block_size, orders)
    for lengths, numbers in zip(orders.seq_lens, orders.schedules.numbers, strict=True):
        found = [vector[: len(lengths)].tolist() for vector in numbers.split(padded(len(lengths)))]
        assert found == oracle.schedule(lengths.tolist(), *sharing)


@many
@given(batches())
def test_the_longest_sequences_come_first_and_their_pages_with_them(batch: Batch) -> None:
    expected, orders = batch.table(), orders_of(batch)
    *tensors, block_size, _, _ = batch.inputs()
    longest_first(*(tensors[part] for part in (1, 3, 4)), block_size, orders)
    buffers = batch.buffers(2)
    out = PageTable(*(part[:, :-1] for part in buffers))
    headwise_page_table(*batch.inputs(), out, orders.sequences[:, :-1])
    assert torch.equal(out.seq_lens, orders.seq_lens)
    for layer, order in enumerate(orders.sequences[:, :-1].tolist()):
        lengths = expected.seq_lens[layer].tolist()
        # Python's sort keeps equal ones in order, reversed too.
        assert order == sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        for row, sequence in enumerate(order):
            num_pages = -(-lengths[sequence] // block_size)
            own = out.pages[layer, row]
            assert torch.equal(own[:num_pages], expected.pages[layer, sequence, :num_pages])
            assert (own[num_pages:] == -7).all()


@many
@given(batches())
def test_layers_alone_are_the_same_as_all_together(batch: Batch) -> None:
    table = batch.table()
    for layer in range(len(batch.pages)):
        alone = batch.table(layers=slice(layer, layer + 1))
        width = alone.pages.shape[2]
        assert torch.equal(alone.pages[0], table.pages[layer, :, :width])
        assert not table.pages[layer, :, width:].any()
        assert torch.equal(alone.seq_lens[0], table.seq_lens[layer])


def test_a_request_is_the_same_in_any_batch() -> None:
    long = Batch(4, 2, [[0, 3, 8, 6, 4]], [18], [1], [3], [[[3, 1]]])
    short = Batch(4, 2, [[0, 0, 9, 2]], [14], [2], [3], [[[0, 2]]])
    both = Batch(4, 2, long.blocks + short.blocks, [18, 14], [1, 2], [3, 3], [[[3, 1], [0, 2]]])
    table = both.table()
    # Block ids, head by head: 3 and 8 are packed, then 6 and 4; 9 is packed, then 2.
    assert table.pages.tolist() == [
        [[6, 7, 16, 12, 8], [17, 13, 9, 0, 0], [4, 0, 0, 0, 0], [18, 19, 5, 0, 0]]
    ]
    assert table.seq_lens.tolist() == [[12 + 6, 4 + 6, 2, 8 + 2]]
    assert torch.equal(long.table().pages, table.pages[:, :2])
    assert torch.equal(short.table().pages, table.pages[:, 2:, :3])
