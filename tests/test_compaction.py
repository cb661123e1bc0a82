"""Compaction, and compaction with page tables: a toy paged cache from prefill through decode."""

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.method_cases import MethodCase, every_method_case
from tests.strategies import (
    Layer,
    Shape,
    few,
    kv_heads,
    many,
    prompt_lengths,
    random_layer,
    seeds,
    some,
)
from vllm_kvselect.choice import retain
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.paging.compaction import head_pages, move_retained, packed_slots, run_pages
from vllm_kvselect.paging.page_table import PageTable, headwise_page_table
from vllm_kvselect.planning.cuts import Cut, cuts
from vllm_kvselect.registry import KNOWN_METHODS

block_ids = st.lists(st.integers(1, 500), min_size=1, max_size=6, unique=True)


@many
@given(block_ids, kv_heads)
def test_pages_are_handed_out_block_by_block_and_slot_by_slot(
    blocks: list[int], num_kv_heads: int
) -> None:
    pages = run_pages(torch.tensor(blocks), num_kv_heads).tolist()
    assert [divmod(page, num_kv_heads) for page in pages] == [
        (block, slot) for block in blocks for slot in range(num_kv_heads)
    ]


@many
@given(st.data(), block_ids, kv_heads, st.sampled_from((1, 4, 16)))
def test_slots_are_the_oracles_whatever_the_budgets(
    data: st.DataObject, blocks: list[int], num_kv_heads: int, block_size: int
) -> None:
    slots = packed_slots(torch.tensor(blocks), num_kv_heads, block_size)
    assert slots.dtype == torch.int64
    num_pages = len(blocks) * num_kv_heads
    cut = st.lists(st.integers(0, num_pages), min_size=num_kv_heads - 1, max_size=num_kv_heads - 1)
    borders = [0, *sorted(data.draw(cut)), num_pages]
    pages = [end - start for start, end in pairwise(borders)]
    places = oracle.packed_places(blocks, pages, block_size)
    expected = [
        (block * num_kv_heads + slot) * block_size + offset
        for head in places
        for block, slot, offset in head
    ]
    assert slots.tolist() == expected


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_entries_are_gathered_before_they_are_scattered(integers: torch.dtype) -> None:
    """Block 4 is packed and read from at once. Codes say block, slot and offset of an entry."""
    num_heads, block_size, num_competing = 2, 4, 8
    codes = torch.arange(6 * num_heads * block_size).view(6, num_heads, block_size, 1)
    memory = torch.cat((codes, -codes), dim=-1)
    blocks = torch.tensor([5, 4], dtype=integers)
    # Head 0 retains tokens 0, 3, 4 and 7, head 1 token 5, then 2, 6 and 1 for good measure.
    retained, before = torch.tensor([0, 3, 4, 7, 13, 10, 14, 9]), memory.clone()
    pages = head_pages(blocks, num_heads)
    move_retained(memory, pages, retained, num_competing, blocks[1:])
    expected = [before[5, 0, 0], before[5, 0, 3], before[4, 0, 0], before[4, 0, 3]]
    expected += [before[4, 1, 1], before[5, 1, 2], before[4, 1, 2], before[5, 1, 1]]
    assert torch.equal(memory[4].flatten(0, 1), torch.stack(expected))
    before[4] = memory[4]
    assert torch.equal(memory, before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_do_not_overflow_with_int32_block_ids(dtype: torch.dtype) -> None:
    """Slots pass 2**31 in a cache of 33 million blocks of 64 entries, pages do not."""
    slots = packed_slots(torch.tensor([2**27], dtype=dtype), 8, 64)
    assert slots.tolist() == list(range(2**36, 2**36 + 8 * 64))


# --- a toy paged cache, end to end ----------------------------------------------------------------


@dataclass
class Prompt:
    """One request: its length, its cut, its block table and what its layers computed."""

    shape: Shape
    cut: Cut | None
    layers: list[Layer]
    blocks: list[int] = field(default_factory=list)
    retained: list[set[tuple[int, int]]] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)

    def first_cached(self) -> int:
        """First token that is in the cache under its own index once entries are dropped."""
        return self.cut.tail_start * self.shape.block_size if self.cut else 0


class ToyCache:
    """Caches `[num_blocks, num_kv_heads, block_size, 2 * head_size]` of several layers.

    Everything that was never written, or was freed, is NaN: reading it cannot go unnoticed.
    """

    def __init__(self, num_layers: int, num_blocks: int, shape: Shape, random: Random) -> None:
        sizes = (num_layers, num_blocks, shape.num_kv_heads, shape.block_size, 2 * shape.head_size)
        self.memory = torch.full(sizes, torch.nan, dtype=torch.float64)
        self.block_size = shape.block_size
        self.free = random.sample(range(1, num_blocks), num_blocks - 1)

    def write(self, prompt: Prompt, token: int) -> None:
        """Writes a token's K and V as vLLM does: its block, the head's own slot."""
        index, offset = divmod(token, self.block_size)
        if index == len(prompt.blocks):
            prompt.blocks.append(self.free.pop())
        for memory, layer in zip(self.memory, prompt.layers, strict=True):
            for head in range(memory.shape[1]):
                entry = torch.cat([layer.key[head, token], layer.value[head, token]])
                memory[prompt.blocks[index], head, offset] = entry

    def compact(self, prompt: Prompt, case: MethodCase, config: EvictionConfig) -> None:
        """Retains, moves the retained entries and frees the blocks before them."""
        shape, cut = prompt.shape, prompt.cut
        if cut is None:
            return
        num_kv_heads = shape.num_kv_heads
        num_tokens = cut.tail_start * self.block_size
        packed = prompt.blocks[cut.first_packed : cut.tail_start]
        if KNOWN_METHODS[config.method].pooled:
            self.compact_pool(prompt, case, config, torch.tensor(packed))
            self.free_blocks(prompt, cut.first_packed)
            return
        for memory, layer in zip(self.memory, prompt.layers, strict=True):
            given = [case.inputs(shape, layer)]
            retention = retain(given, cut.num_packed, self.block_size, config)
            pages = head_pages(torch.tensor(prompt.blocks), num_kv_heads)
            move_retained(memory, pages, retention.retained, num_tokens, torch.tensor(packed))
            entries = [divmod(index, num_tokens) for index in retention.retained.tolist()]
            prompt.retained.append(set(entries))
            prompt.pages.append(retention.offsets.diff().tolist())
        self.free_blocks(prompt, cut.first_packed)

    def compact_pool(
        self, prompt: Prompt, case: MethodCase, config: EvictionConfig, packed: torch.Tensor
    ) -> None:
        """The same for layers that share the packed pages: one cache of as many heads."""
        assert prompt.cut is not None
        num_tokens = prompt.cut.tail_start * self.block_size
        num_layers, num_blocks, num_heads = self.memory.shape[:3]
        given = [
            case.inputs(prompt.shape, layer, index) for index, layer in enumerate(prompt.layers)
        ]
        retention = retain(given, prompt.cut.num_packed, self.block_size, config)
        starts = [layer * num_blocks for layer in range(num_layers)]
        held = torch.tensor(prompt.blocks)
        pages = torch.cat([head_pages(held + start, num_heads) for start in starts])
        targets = torch.cat([packed + start for start in starts])
        move_retained(self.memory.flatten(0, 1), pages, retention.retained, num_tokens, targets)
        flat = [divmod(index, num_tokens) for index in retention.retained.tolist()]
        for layer, pages in enumerate(retention.offsets.diff().view(num_layers, -1).tolist()):
            own = {(o % num_heads, token) for o, token in flat if o // num_heads == layer}
            prompt.retained.append(own)
            prompt.pages.append(pages)

    def free_blocks(self, prompt: Prompt, num_freed: int) -> None:
        for index in range(num_freed):
            self.memory[:, prompt.blocks[index]] = torch.nan
            self.free.append(prompt.blocks[index])
            prompt.blocks[index] = 0

    def walk(self, pages: torch.Tensor, length: int) -> list[tuple[oracle.Vector, oracle.Vector]]:
        """Entries of one sequence of the one-head view, as a paged attention kernel reads them."""
        sizes = self.memory.shape
        one_head = self.memory.view(-1, sizes[3], sizes[4])
        entries: list[tuple[oracle.Vector, oracle.Vector]] = []
        for index in range(length):
            page, offset = int(pages[index // self.block_size]), index % self.block_size
            key, value = one_head[page, offset].chunk(2)
            entries.append((key.tolist(), value.tolist()))
        return entries


def page_table(
    prompts: list[Prompt], seq_lens: list[int], num_layers: int, num_blocks: int
) -> PageTable:
    """Page tables of the batch; a prompt without a plan has no packed blocks at all."""
    num_kv_heads = prompts[0].shape.num_kv_heads
    width = max(len(prompt.blocks) for prompt in prompts)
    # Beyond a request's blocks vLLM's block table holds whatever was there before.
    rows = [prompt.blocks + [2**31 - 1] * (width - len(prompt.blocks)) for prompt in prompts]
    offsets = torch.zeros(num_layers, len(prompts), num_kv_heads + 1, dtype=torch.int32)
    for row, prompt in enumerate(prompts):
        num_handed_out = 0
        for layer, pages in enumerate(prompt.pages):
            ends = num_handed_out + torch.tensor([0, *pages]).cumsum(0)
            offsets[layer, row], num_handed_out = ends, int(ends[-1])
    return headwise_page_table(
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.tensor([p.cut.first_packed if p.cut else 0 for p in prompts]),
        torch.tensor([p.cut.tail_start if p.cut else 0 for p in prompts]),
        offsets,
        prompts[0].shape.block_size,
        num_blocks,
    )


def cut_of(shape: Shape, config: EvictionConfig) -> Cut | None:
    planned = cuts(shape.num_prompt_tokens, shape.block_size, config)
    return planned.last_made(shape.num_prompt_tokens)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Shape], int, int]:
    """Shapes of one to three requests, number of layers and the budget."""
    num_kv_heads, group = draw(kv_heads), draw(st.integers(1, 3))
    block_size, window = draw(st.sampled_from((4, 8))), draw(st.integers(1, 6))
    budget = draw(st.integers(1, 3 * block_size))
    lengths = draw(st.lists(prompt_lengths(block_size, window, budget), min_size=1, max_size=3))
    shapes = []
    for length in lengths:
        num_prompt_tokens = max(length, window)
        shapes.append(Shape(num_kv_heads, group, 8, block_size, window, num_prompt_tokens, 1))
    return shapes, draw(st.integers(1, 2)), budget


def check_end_to_end(
    case: MethodCase, batch: tuple[list[Shape], int, int], seed: int, num_steps: int
) -> None:
    shapes, num_layers, budget = batch
    first = shapes[0]
    random = Random(seed)
    config = case.config(budget=budget, window=first.window)
    prompts = []
    for shape in shapes:
        cut = cut_of(shape, config)
        # Keys and values of the tokens to be generated are drawn along with the prompt's.
        longer = Shape(**{**vars(shape), "num_prompt_tokens": shape.num_prompt_tokens + num_steps})
        layers = [random_layer(longer, random.randrange(2**32)) for _ in range(num_layers)]
        prompts.append(Prompt(shape, cut, layers))
    num_blocks = 1 + sum(1 + (s.num_prompt_tokens + num_steps) // s.block_size for s in shapes)
    cache = ToyCache(num_layers, num_blocks, first, random)
    for prompt in prompts:
        for token in range(prompt.shape.num_prompt_tokens):
            cache.write(prompt, token)
        cache.compact(prompt, case, config)

    for step in range(num_steps):
        seq_lens = [prompt.shape.num_prompt_tokens + step + 1 for prompt in prompts]
        for prompt, seq_len in zip(prompts, seq_lens, strict=True):
            cache.write(prompt, seq_len - 1)
        table = page_table(prompts, seq_lens, num_layers, num_blocks)
        for row, (prompt, seq_len) in enumerate(zip(prompts, seq_lens, strict=True)):
            for layer in range(num_layers):
                check_decode(cache, table, prompt, row, layer, seq_len, random)


def check_decode(
    cache: ToyCache,
    table: PageTable,
    prompt: Prompt,
    row: int,
    layer: int,
    seq_len: int,
    random: Random,
) -> None:
    """Attention over the pages equals attention over the set of retained entries and the tail."""
    shape = prompt.shape
    entries, expected = [], []
    key, value = prompt.layers[layer].key.tolist(), prompt.layers[layer].value.tolist()
    retained = prompt.retained[layer] if prompt.cut else set()
    for head in range(shape.num_kv_heads):
        sequence = row * shape.num_kv_heads + head
        length = int(table.seq_lens[layer, sequence])
        entries.append(cache.walk(table.pages[layer, sequence], length))
        tokens = [token for owner, token in sorted(retained) if owner == head]
        tokens += range(prompt.first_cached(), seq_len)
        expected.append([(key[head][token], value[head][token]) for token in tokens])
    # The very entries, each once and in the tokens' order, which causal masks rely on.
    assert entries == expected

    query = [[random.gauss(0, 2) for _ in range(shape.head_size)] for _ in range(shape.num_heads)]
    everything = retained | {
        (head, token)
        for head in range(shape.num_kv_heads)
        for token in range(prompt.first_cached(), seq_len)
    }
    walked = oracle.attend(query, entries, shape.scale)
    reference = oracle.decode_attention(query, key, value, everything, shape.scale)
    torch.testing.assert_close(
        torch.tensor(walked, dtype=torch.float64),
        torch.tensor(reference, dtype=torch.float64),
        rtol=0,
        atol=1e-12,
    )


@some
@given(batches(), seeds)
def test_decode_reads_exactly_the_retained_entries(
    batch: tuple[list[Shape], int, int], seed: int
) -> None:
    """Several requests and layers at once, with and without a cut, across block borders."""
    check_end_to_end(MethodCase("adakv-perturb", {"safeguard": 0.0}), batch, seed, 5)


@every_method_case
@few
@given(seed=seeds)
def test_every_method_decodes_what_it_retained(case: MethodCase, seed: int) -> None:
    shape = Shape(3, 2, 8, 4, 3, 30, 1)
    check_end_to_end(case, ([shape, Shape(3, 2, 8, 4, 3, 23, 1)], 2, 11), seed % 1000, 3)


def test_a_head_without_a_page_still_attends_to_the_tail() -> None:
    """Head 0 attends to nothing before the window, so its sibling takes all pages."""
    shape = Shape(2, 2, 8, 4, 3, 31, 2)
    layer = random_layer(Shape(2, 2, 8, 4, 3, 35, 2), 0)
    layer.key[0, :28], layer.query[:, :2] = -layer.query[0, 0], layer.query[0, 0]
    layer.key[0, 28:] = 5 * layer.query[0, 0]
    case = MethodCase("adakv", {"safeguard": 0.0, "kernel_size": 1})
    config = case.config(budget=10, window=3)
    prompt = Prompt(shape, cut_of(shape, config), [layer])
    random = Random(0)
    cache = ToyCache(1, 12, shape, random)
    for token in range(31):
        cache.write(prompt, token)
    cache.compact(prompt, case, config)
    assert prompt.cut == Cut(31, 5, 2, 7)
    assert prompt.pages == [[0, 4]]
    for seq_len in range(32, 36):
        cache.write(prompt, seq_len - 1)
        table = page_table([prompt], [seq_len], 1, 12)
        assert table.seq_lens.tolist() == [[seq_len - 28, seq_len - 28 + 16]]
        check_decode(cache, table, prompt, 0, 0, seq_len, random)
