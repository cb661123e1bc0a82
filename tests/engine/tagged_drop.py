"""Layers whose entries are tags, and a drop that checks all that a choice could see of them."""

from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from tests.engine.tagged_rows import Row, require
from vllm_kvselect.choice import Retention
from vllm_kvselect.engine.drop.drop import Drop
from vllm_kvselect.kernels.base import REFERENCES
from vllm_kvselect.paging.compaction import move_retained
from vllm_kvselect.planning.cuts import Cut
from vllm_kvselect.scoring.held import Held
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.selecting.ranking import Candidates

if TYPE_CHECKING:
    from tests.engine.tagged_worker import TaggedWorker

NUM_LAYERS, NUM_KV_HEADS = 2, 2
LONGEST = 2**10
"""More tokens than any request has."""
CODES = np.arange(NUM_LAYERS * NUM_KV_HEADS).reshape(NUM_LAYERS, NUM_KV_HEADS)


class TaggedLayer:
    """A layer whose entries are tags: what is read and moved are these.

    Args:
        cache: `[num_layers, num_blocks, num_kv_heads, block_size]`.
        layer_index: The layer's place.
    """

    kernels = REFERENCES
    memory = None

    def __init__(self, cache: np.ndarray, layer_index: int) -> None:
        self._pages = torch.from_numpy(cache).view(-1, cache.shape[-1])
        self.kv_cache, self.layer_index = torch.from_numpy(cache[layer_index]), layer_index
        self.num_kv_heads = cache.shape[2]

    def inputs(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> ScoringInputs:
        return ScoringInputs(query, key, value, 1.0, layer_index=self.layer_index)

    def read(self, pages: torch.Tensor, num_competing: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.read_values(pages), self.read_values(pages[:, :num_competing])

    def pages_of(self, blocks: torch.Tensor) -> torch.Tensor:
        heads = torch.arange(self.num_kv_heads)[:, None]
        return (self.layer_index * len(self.kv_cache) + blocks) * self.num_kv_heads + heads

    def read_keys(self, pages: torch.Tensor) -> torch.Tensor:
        return self.read_values(pages).double()

    def read_values(self, pages: torch.Tensor) -> torch.Tensor:
        return self._pages[pages].flatten(1)[..., None]

    def move(self, *moved: Any) -> None:
        move_retained(self._pages.view(-1, *self.kv_cache.shape[1:], 1), *moved)


class TaggedDrop(Drop):
    """The product's drop, but for the choice: it is drawn, and all that it could see is checked."""

    worker: ClassVar["TaggedWorker"]

    def make(self) -> None:
        self.seen = [
            Seen(self, place, self.worker.row_of(request), cut)
            for place, (request, cut) in enumerate(zip(self.requests, self.cuts, strict=True))
        ]
        self.worker.num_together += len(self.seen) > 1
        super().make()
        for each, key in zip(self.seen, self.keys, strict=True):
            each.take_note(key)

    def candidates(self, held: Held) -> Candidates:
        """All that a scorer is given is checked, and but for a probe it scores nothing."""
        shape = held.num_rows, NUM_KV_HEADS, held.num_competing
        candidates = Candidates(torch.zeros(shape), num_absent=held.num_absent)
        if self.settings.method == "layer-probe":
            candidates = super().candidates(held)
        for each in self.seen:
            each.check(held, candidates.scores)
        return candidates

    def retention(self, held: Held | None, candidates: Candidates) -> Retention:
        pools = [[*range(NUM_LAYERS)]] if self._is_pooled else [[i] for i in range(NUM_LAYERS)]
        self.worker.num_pools += self._is_pooled * len(self.seen)
        chosen, offsets = [], []
        for each in self.seen:
            pages: list[int] = []
            for pool in pools:
                pages += each.draw(pool, chosen)
            offsets.append([0, *np.cumsum(pages).tolist()])
        return Retention(torch.tensor(chosen), torch.tensor(offsets))


class Seen:
    """What a drop may see of one of its requests, and what is drawn of it.

    Args:
        drop: The drop.
        place: The request's place in it.
        row: The request's row.
        cut: The cut that is made.
    """

    def __init__(self, drop: TaggedDrop, place: int, row: Row, cut: Cut) -> None:
        self.drop, self.place, self.row, self.cut = drop, place, row, cut
        self.columns, self.worker, self.settings = drop.columns, drop.worker, drop.settings
        self.block_size = drop._page_size
        self.is_round = not self.columns.is_even
        # What each head of each layer retains, which later tokens will read.
        self.drawn: list[list[np.ndarray]] = [[] for _ in range(NUM_LAYERS)]
        self.random = Random(f"{row.request_id} retains at {cut.position}")

    @property
    def name(self) -> str:
        kind = "a round" if self.is_round else "selection"
        return f"{kind} of {self.row.request_id}"

    def num_absent(self, layer: int, head: int) -> int:
        return int(self.columns.num_absent[self.place, layer, head])

    def check(self, held: Held, scores: torch.Tensor) -> None:
        """A drop sees what was retained and everything after it, and no more."""
        self._check_cut()
        for layer in range(NUM_LAYERS):
            row = self.place * NUM_LAYERS + layer
            inputs = held.row(row)
            self._check_entries(layer, inputs)
            if self.settings.method == "layer-probe":
                self._check_scores(layer, scores[row])
            else:
                self._check_queries(inputs)

    def take_note(self, key: int) -> None:
        """What the request holds from now on."""
        row = self.row
        row.packed, row.packed_position = self.drawn, self.cut.position
        is_last = any(self.cut.position == each.position for each in row.in_prompt[-1:])
        self.worker.num_completions += is_last
        self.worker.packed_at[key] = row.identity(self.cut.position), row.packed

    def _check_cut(self) -> None:
        row, cut, window = self.row, self.cut, self.settings.window
        due = [each for each in row.cuts if each.position == cut.position]
        require(due, f"{self.name} at {cut.position} is not due")
        expected = (due[0].first_packed, due[0].tail_start)
        got = (cut.first_packed, cut.tail_start)
        require(got == expected, f"{self.name} frees and packs {got}, not {expected}")
        is_early = self.cut.position < row.num_prompt_tokens and self.is_round
        self.worker.num_in_prompts += is_early
        self.worker.num_rounds += self.cut.position > row.num_prompt_tokens
        is_probed = row.eviction.method == "layer-probe"
        self.worker.num_scores_kept += self.is_round and is_probed
        pieces = self.drop.requests[self.place].progress.queries._pieces
        begins_early = len(pieces) > 1 and pieces[0].end > cut.position - window
        self.worker.num_windows_in_chunks += begins_early and not (self.is_round or is_probed)

    def _held(self, layer: int, head: int) -> np.ndarray:
        """What a head holds up to the cut: what it retained before, and everything after it."""
        row = self.row
        before = [each for each in row.cuts if each.position < self.cut.position]
        start = before[-1].tail_start * self.block_size if before else 0
        tail = row.tags[start : self.cut.position] * CODES.size + CODES[layer, head]
        return np.concatenate((row.packed[layer][head], tail)) if before else tail

    def _check_entries(self, layer: int, inputs: ScoringInputs) -> None:
        missing = self.columns.num_missing[self.place]
        for head in range(NUM_KV_HEADS):
            read = inputs.key[head, self.num_absent(layer, head) - missing :, 0].numpy()
            require(
                self.row.request_id in self.worker.damaged
                or np.array_equal(read, self._held(layer, head)),
                f"{self.name} read wrong entries: layer {layer}, head {head}",
            )

    def _check_queries(self, inputs: ScoringInputs) -> None:
        window = self.row.tags[self.cut.position - self.settings.window : self.cut.position]
        looked = inputs.query.flatten().numpy()
        require(np.array_equal(looked, window), f"{self.name} looks through other queries")

    def _check_scores(self, layer: int, scores: torch.Tensor) -> None:
        """Every entry has the score that it got, at its position, when it first competed."""
        positions = {tag: position for position, tag in enumerate(self.row.tags.tolist())}
        for head in range(NUM_KV_HEADS):
            own = scores[head, self.num_absent(layer, head) :].tolist()
            held = self._held(layer, head)[: len(own)].tolist()
            expected = [entry * LONGEST + positions[entry // CODES.size] for entry in held]
            require(
                self.row.request_id in self.worker.damaged or own == expected,
                f"{self.name} has scores of other entries",
            )

    def draw(self, pool: list[int], chosen: list[int]) -> list[int]:
        """Pages for each head, no more than it can fill; entries for them are added to `chosen`."""
        heads = [(layer, head) for layer in pool for head in range(NUM_KV_HEADS)]
        absent = [self.num_absent(*each) for each in heads]
        num_competing = self.columns.num_competing
        room = [(num_competing - none) // self.block_size for none in absent]
        pages = [0] * len(heads)
        for _ in range(self.cut.num_packed * len(heads)):
            pages[self.random.choice([i for i, most in enumerate(room) if pages[i] < most])] += 1
        for place, (layer, head) in enumerate(heads):
            columns = range(absent[place], num_competing)
            own = sorted(self.random.sample(columns, pages[place] * self.block_size))
            owner = (self.place * NUM_LAYERS + layer) * NUM_KV_HEADS + head
            chosen += [owner * num_competing + column for column in own]
            held = self._held(layer, head)
            self.drawn[layer].append(held[[column - absent[place] for column in own]])
        return pages
