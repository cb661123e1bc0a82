"""Layers whose entries are tags, and a drop that checks all that a choice could see of them."""

from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from tests.engine.tagged_rows import Row, require
from vllm_kvselect.choice import Retention
from vllm_kvselect.engine.drop.drop import Drop
from vllm_kvselect.kernels.base import REFERENCES
from vllm_kvselect.scorers import FirstTokens
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
    output_projection = None

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

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        slots = self._pages.view(-1)
        slots[targets] = slots[sources].clone()


class TaggedDrop(Drop):
    """The product's drop, but for the choice: it is drawn, and all that it could see is checked."""

    worker: ClassVar["TaggedWorker"]

    @property
    def row(self) -> Row:
        return self.worker.row_of(self.request)

    @property
    def is_round(self) -> bool:
        return self.columns.num_absent is not None

    @property
    def name(self) -> str:
        kind = "a round" if self.is_round else "selection"
        return f"{kind} of {self.row.request_id}"

    def num_absent(self, layer: int, head: int) -> int:
        absent = self.columns.num_absent
        return 0 if absent is None else int(absent[layer, head])

    def candidates(self, layer: Any, inputs: ScoringInputs) -> Candidates:
        """All that a scorer is given is checked, and it scores nothing."""
        if layer.layer_index == 0:
            self._check_cut()
        self._check_entries(layer.layer_index, inputs)
        if self.row.eviction.method == "h2o":
            self._check_sums(layer.layer_index, inputs)
        elif self.row.eviction.method == "layer-probe":
            self._check_scores(layer.layer_index, inputs)
        else:
            self._check_queries(inputs)
        scores = torch.zeros(NUM_KV_HEADS, self.num_competing)
        return Candidates(scores, num_absent=inputs.num_absent)

    def retention(self, layer: Any, candidates: Candidates, value: Any) -> Retention:
        return self._draw([layer.layer_index])

    def retention_of_all(self, layer: Any, candidates: Candidates) -> Retention:
        self.worker.num_pools += 1
        return self._draw([*range(NUM_LAYERS)])

    def _complete(self, layer: Any) -> None:
        super()._complete(layer)
        row, key = self.row, int(self.key)
        row.packed, row.packed_position = self.drawn, self.cut.position
        if any(self.cut.position == each.position for each in row.in_prompt[-1:]):
            self.worker.num_completions += 1
            self.worker.packed_at[key] = row.context, row.packed

    def _check_cut(self) -> None:
        row, cut, window = self.row, self.cut, self.settings.window
        due = [each for each in row.cuts if each.position == cut.position]
        require(due, f"{self.name} at {cut.position} is not due")
        expected = (due[0].first_packed, due[0].tail_start)
        got = (cut.first_packed, cut.tail_start)
        require(got == expected, f"{self.name} frees and packs {got}, not {expected}")
        # What each head of each layer retains, which later tokens will read.
        self.drawn: list[list[np.ndarray]] = [[] for _ in range(NUM_LAYERS)]
        self.random = Random(f"{row.request_id} retains at {cut.position}")
        is_whole = row.eviction.method == "h2o"
        is_early = self.cut.position < row.num_prompt_tokens and self.is_round
        self.worker.num_in_prompts += is_early
        self.worker.num_rounds += self.cut.position > row.num_prompt_tokens
        self.worker.num_sums += self.is_round and is_whole
        self.worker.num_whole_prompts += not self.is_round and is_whole
        is_probed = row.eviction.method == "layer-probe"
        self.worker.num_scores_kept += self.is_round and is_probed
        begins_early = not self.is_round and cut.position - window < row.num_computed
        self.worker.num_windows_in_chunks += begins_early and not (is_whole or is_probed)

    def _held(self, layer: int, head: int) -> np.ndarray:
        """What a head holds up to the cut: what it retained before, and everything after it."""
        row = self.row
        before = [each for each in row.cuts if each.position < self.cut.position]
        start = before[-1].tail_start * self._block_size if before else 0
        tail = row.tags[start : self.cut.position] * CODES.size + CODES[layer, head]
        return np.concatenate((row.packed[layer][head], tail)) if before else tail

    def _check_entries(self, layer: int, inputs: ScoringInputs) -> None:
        """A drop sees what was retained and everything after it, and no more."""
        for head in range(NUM_KV_HEADS):
            read = inputs.key[head, self.num_absent(layer, head) :, 0].numpy()
            require(
                self.row.request_id in self.worker.damaged
                or np.array_equal(read, self._held(layer, head)),
                f"{self.name} read wrong entries: layer {layer}, head {head}",
            )

    def _check_queries(self, inputs: ScoringInputs) -> None:
        window = self.row.tags[self.cut.position - self.settings.window : self.cut.position]
        looked = inputs.query.flatten().numpy()
        require(np.array_equal(looked, window), f"{self.name} looks through other queries")

    def _check_sums(self, layer: int, inputs: ScoringInputs) -> None:
        """Every entry has its own sum: the tag that the query of its token left there."""
        assert inputs.numbers is not None
        for head in range(NUM_KV_HEADS):
            own = inputs.numbers[head, self.num_absent(layer, head) : self.columns.num_entries]
            tags = own.numpy() * CODES.size + CODES[layer, head]
            require(
                self.row.request_id in self.worker.damaged
                or np.array_equal(tags, self._held(layer, head)),
                f"{self.name} has sums of other entries",
            )

    def _check_scores(self, layer: int, inputs: ScoringInputs) -> None:
        """Every entry has the score that it got, at its position, when it first competed."""
        assert inputs.numbers is not None
        num_sinks = self.settings.of(FirstTokens).num_sinks
        positions = {tag: position for position, tag in enumerate(self.row.tags.tolist())}
        for head in range(NUM_KV_HEADS):
            own = inputs.numbers[head, self.num_absent(layer, head) : self.num_competing].tolist()
            held = self._held(layer, head)[: len(own)].tolist()
            expected = [entry * LONGEST + positions[entry // CODES.size] for entry in held]
            for place, entry in enumerate(held):
                if positions[entry // CODES.size] < num_sinks:
                    expected[place] = float("inf")
            require(
                self.row.request_id in self.worker.damaged or own == expected,
                f"{self.name} has scores of other entries",
            )

    def _draw(self, pool: list[int]) -> Retention:
        """Pages for each head, no more than it can fill, and entries for them."""
        heads = [(layer, head) for layer in pool for head in range(NUM_KV_HEADS)]
        absent = [self.num_absent(*each) for each in heads]
        room = [(self.num_competing - none) // self._block_size for none in absent]
        pages = [0] * len(heads)
        for _ in range(self.cut.num_packed * len(heads)):
            pages[self.random.choice([i for i, most in enumerate(room) if pages[i] < most])] += 1
        chosen = []
        for place, (layer, head) in enumerate(heads):
            columns = range(absent[place], self.num_competing)
            own = sorted(self.random.sample(columns, pages[place] * self._block_size))
            chosen += [place * self.num_competing + column for column in own]
            held = self._held(layer, head)
            self.drawn[layer].append(held[[column - absent[place] for column in own]])
        return Retention(torch.tensor(chosen), torch.tensor([0, *np.cumsum(pages).tolist()]))
