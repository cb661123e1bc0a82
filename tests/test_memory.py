"""Memories: continued without a gap, the same scores, and numbers that move with their entries."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.strategies import Shape, random_layer, rotation, scoring_inputs
from vllm_kvselect.choice import score_layer
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.registry import METHODS
from vllm_kvselect.scoring.h2o import AttentionSums
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.memory import LastQueries, ObservingMemory, StepQueries
from vllm_kvselect.scoring.parts import memory_named
from vllm_kvselect.scoring.probe import ScoresOfTokens, probed_scores
from vllm_kvselect.scoring.value_norms import OutputProjection

NUM_LAYERS = 2
SHAPE = Shape(2, 3, 8, 8, 3, 51, 2)
COMPETING = slice(SHAPE.num_tokens)
LAYERS = [random_layer(SHAPE, layer, torch.float32, with_sinks=True) for layer in range(NUM_LAYERS)]
OBSERVING_METHODS = [name for name, method in METHODS.items() if method.scorer.observes]


def make_config(method: str) -> EvictionConfig:
    return EvictionConfig.parse({"method": method, "budget": 16, "window": SHAPE.window})


def make_memory(method: str) -> ObservingMemory:
    remembered = METHODS[method].scorer.memory
    assert remembered is not None
    make = memory_named(remembered.by)
    memory = make(SHAPE.num_prompt_tokens, NUM_LAYERS, make_config(method))
    assert isinstance(memory, ObservingMemory)
    return memory


def inputs(index: int, query: slice, key: slice, value: slice = COMPETING) -> Any:
    layer = LAYERS[index]
    projection = OutputProjection.of(layer.output_projection)
    tensors = layer.prompt_query[query], layer.key[:, key], SHAPE.scale, layer.value[:, value]
    return scoring_inputs(*tensors, projection, layer.sinks, index, probe=layer.probe)


def observe(memory: ObservingMemory, start: int, end: int) -> None:
    """A chunk in every layer, with the keys that the memory asks for."""
    for index in range(NUM_LAYERS):
        key = slice(0 if memory.reads_earlier_keys else start, end)
        chunk = slice(start, end)
        memory.observe(inputs(index, chunk, key, chunk), start)


@pytest.mark.parametrize("cuts", [(), (1,), (16, 32, 48), (7, 50), (49,), (48, 49, 50)])
@pytest.mark.parametrize("method", OBSERVING_METHODS)
def test_chunks_of_any_size_give_the_scores(method: str, cuts: tuple[int, ...]) -> None:
    memory = make_memory(method)
    for start, end in pairwise([0, *cuts, SHAPE.num_prompt_tokens]):
        observe(memory, start, end)
    config, everything = make_config(method), slice(0, SHAPE.num_prompt_tokens)
    for index in range(NUM_LAYERS):
        expected = score_layer(inputs(index, everything, everything), config)
        found = score_layer(memory.complete(inputs(index, slice(0), everything)), config)
        for part, own in zip(found, expected, strict=True):
            assert (part is None) == (own is None)
            if part is not None and own is not None:
                torch.testing.assert_close(part, own, rtol=1e-5, atol=0)


@pytest.mark.parametrize("first_position", [8, 30, 32])
def test_a_gap_is_an_error(first_position: int) -> None:
    memory = make_memory("h2o")
    observe(memory, 0, 31)
    with pytest.raises(RuntimeError, match=f"up to token 31, and it goes on at {first_position}"):
        observe(memory, first_position, 40)


# Last queries


def steps(*lens: int) -> list[tuple[StepQueries, torch.Tensor]]:
    """Queries of some steps, and what they are: each of its own position."""
    found, position = [], 0
    for length in lens:
        query = torch.arange(position, position + length, dtype=torch.float32)[:, None, None]
        seen = StepQueries(slice(None), 2)
        for index in range(2):
            seen.see(index, query + 100 * index)
        found.append((seen, query))
        position += length
    return found


@pytest.mark.parametrize("tokens", [slice(1, 3), torch.tensor([1, 2])])
def test_layers_are_kept_side_by_side(tokens: slice | torch.Tensor) -> None:
    layers = torch.arange(2 * 4 * 3 * 2, dtype=torch.float32).view(2, 4, 3, 2)
    seen = StepQueries(tokens, 2)
    for index, query in enumerate(layers):
        seen.see(index, query)
        query.zero_()  # a runner writes the next step's into the same memory
    fresh = torch.arange(2 * 4 * 3 * 2, dtype=torch.float32).view(2, 4, 3, 2)
    assert torch.equal(seen.all, fresh[:, [1, 2]])


def test_last_queries_are_found_by_position_across_steps() -> None:
    queries, position = LastQueries(), 0
    for seen, query in steps(5, 1, 1, 3):
        queries.keep(seen, 0, position, position + len(query))
        position += len(query)
    assert queries.of_layer(1, 3, 9).flatten().tolist() == [103, 104, 105, 106, 107, 108]
    assert queries.of_all_layers(4, 7).flatten().tolist() == [4, 5, 6, 104, 105, 106]
    queries.forget_before(6)
    assert queries.of_layer(0, 6, 10).flatten().tolist() == [6, 7, 8, 9]
    with pytest.raises(LookupError, match="tokens 5 to 10 were not kept"):
        queries.of_layer(0, 5, 10)
    with pytest.raises(LookupError, match="tokens 10 to 11 were not kept"):
        queries.of_layer(0, 8, 11)


def test_queries_of_rejected_drafts_give_way() -> None:
    queries = LastQueries()
    (first, _), (again, _) = steps(6, 6)
    queries.keep(first, 0, 0, 6)
    queries.keep(again, 0, 3, 5)  # positions 3 to 5 were of drafts
    assert queries.of_layer(0, 1, 5).flatten().tolist() == [1, 2, 6, 7]
    with pytest.raises(LookupError):
        queries.of_layer(0, 1, 6)


# Numbers of entries

NUM_TAIL = 3
LENGTHS = torch.tensor([[2, 4], [6, 0]])
"""Packed entries of two heads in two layers."""
NOTHING = torch.zeros(2, 2, dtype=torch.int64)


class Given(AttentionSums):
    """Numbers that are given instead of added up."""

    def __init__(self, numbers: torch.Tensor) -> None:
        super().__init__(numbers.shape[2], NUM_LAYERS, make_config("h2o"))
        self._given = numbers
        self.reads_earlier_keys = False
        for index in range(NUM_LAYERS):
            self.observe(self.layer(index, numbers.shape[2]), 0)

    def layer(self, index: int, num_queries: int) -> ScoringInputs:
        query = torch.zeros(num_queries, 2, 1)
        key = query.transpose(0, 1)
        return ScoringInputs(query, key, key, 1.0, layer_index=index)

    def added(self, inputs: ScoringInputs, *_: Any) -> torch.Tensor:
        return self._given[inputs.layer_index]

    @property
    def numbers(self) -> torch.Tensor:
        layers = (self.complete(self.layer(index, 0)).numbers for index in range(NUM_LAYERS))
        return torch.stack([each for each in layers if each is not None])


def columns(lengths: torch.Tensor, num_tail: int) -> tuple[torch.Tensor, int, torch.Tensor]:
    """A number for each entry, all heads ending together; columns before the tail; absent ones."""
    num_packed = int(lengths.max())
    num_absent = num_packed - lengths
    numbers = torch.arange(1.0, 4 * (num_packed + num_tail) + 1).view(2, 2, -1)
    numbers[torch.arange(num_packed + num_tail) < num_absent[..., None]] = 0
    return numbers, num_packed, num_absent


def of_columns(lengths: torch.Tensor) -> tuple[Given, torch.Tensor, int, torch.Tensor]:
    """Numbers whose packed entries are some of the columns; those, packed ones, absent ones."""
    numbers, num_packed, num_absent = columns(lengths, NUM_TAIL)
    memory = Given(numbers)
    present = ~(torch.arange(num_packed) < num_absent[..., None])
    memory.retain(0, num_packed, present.flatten().nonzero().squeeze(-1))
    memory.settle(100, num_packed)
    return memory, numbers, num_packed, num_absent


def test_numbers_come_back_in_columns_with_zeros_for_later_entries() -> None:
    memory, numbers, num_packed, num_absent = of_columns(LENGTHS)
    assert memory.position == 100
    memory.lay_out(num_packed + NUM_TAIL + 2, num_packed, num_absent)
    assert torch.equal(memory.numbers, torch.nn.functional.pad(numbers, (0, 2)))


def test_numbers_rest_where_nothing_is_dropped() -> None:
    memory, numbers, num_packed, num_absent = of_columns(LENGTHS)
    memory.lay_out(num_packed + NUM_TAIL, num_packed, num_absent)
    memory.rest(103, num_packed, num_absent)
    assert memory.position == 103
    memory.lay_out(num_packed + NUM_TAIL, num_packed, num_absent)
    assert torch.equal(memory.numbers, numbers)


@pytest.mark.parametrize("together", [False, True])
def test_numbers_of_what_is_retained_move_with_it(together: bool) -> None:
    memory, numbers, num_packed, num_absent = of_columns(LENGTHS)
    memory.lay_out(num_packed + NUM_TAIL, num_packed, num_absent)
    retained = torch.tensor([4, 5, 9, 12, 13, 14])  # heads 0, 1, and 2
    if together:
        memory.retain(0, num_packed, retained)
    else:
        memory.retain(0, num_packed, retained[:3])
        memory.retain(1, num_packed, retained[3:] - 12)
    memory.settle(106, num_packed)
    flat = [numbers[index // 12, index // 6 % 2, index % 6] for index in retained.tolist()]
    # Then heads have 2, 1, 3 and no packed entries.
    lengths = torch.tensor([[2, 1], [3, 0]])
    memory.lay_out(3 + NUM_TAIL + 1, 3, 3 - lengths)
    again = memory.numbers
    assert again[0, 0].tolist() == [0, *flat[:2], *numbers[0, 0, -NUM_TAIL:].tolist(), 0]
    assert again[0, 1].tolist() == [0, 0, flat[2], *numbers[0, 1, -NUM_TAIL:].tolist(), 0]
    assert again[1, 0].tolist() == [*flat[3:], *numbers[1, 0, -NUM_TAIL:].tolist(), 0]
    assert again[1, 1].tolist() == [0, 0, 0, *numbers[1, 1, -NUM_TAIL:].tolist(), 0]


def test_a_prompt_of_which_nothing_is_dropped_has_a_tail_only() -> None:
    numbers = torch.rand(2, 2, 7)
    memory = Given(numbers)
    assert memory.position == 7
    memory.lay_out(9, 0, NOTHING)
    assert torch.equal(memory.numbers[..., :7], numbers)
    memory.rest(9, 0, NOTHING)
    memory.lay_out(9, 0, NOTHING)
    assert torch.equal(memory.numbers[..., :7], numbers)


def test_queries_since_then_are_added_to_all_entries() -> None:
    numbers = torch.rand(2, 2, 7)
    memory = Given(numbers)
    completed = memory.complete(memory.layer(1, 7))
    assert completed.numbers is not None
    assert torch.equal(completed.numbers, 2 * numbers[1])
    assert torch.equal(memory.complete(replace(completed, layer_index=0)).numbers, 2 * numbers[0])


# Scores of tokens

PROBE_SHAPE = Shape(2, 1, 8, 8, 3, 70, 2)
PROBED = [random_layer(PROBE_SHAPE, layer, torch.float64) for layer in range(NUM_LAYERS)]
NUM_SINKS = 11
"""More than compete at the first cut of a test."""


class Probed:
    """Cuts of a made-up request: what competes and what is retained, head by head."""

    def __init__(self) -> None:
        config = make_config("probe").model_copy(update={"num_sinks": NUM_SINKS})
        self.memory, self.num_seen = ScoresOfTokens(0, NUM_LAYERS, config), 0
        self.held = {(layer, head): list[int]() for layer in range(NUM_LAYERS) for head in range(2)}
        self.num_columns_scored: list[int] = []

    def cut(self, begin_of_tail: int, position: int, keep: int, together: bool) -> None:
        """Makes a cut, which must give every column its token's score; heads keep uneven lots."""
        generator = torch.Generator().manual_seed(position)
        lengths = {owner: len(held) for owner, held in self.held.items()}
        num_packed = max(lengths.values())
        absent = torch.tensor([num_packed - n for n in lengths.values()]).view(NUM_LAYERS, 2)
        tokens = {
            owner: [0] * int(absent[owner]) + held + [*range(self.num_seen, position)]
            for owner, held in self.held.items()
        }
        num_tail = position - begin_of_tail
        num_columns = num_packed + position - self.num_seen
        num_competing = num_columns - num_tail
        if self.num_seen:
            self.memory.lay_out(num_columns, num_packed, absent)
        retained = []
        for index in range(NUM_LAYERS):
            numbers = self._complete(index, tokens, num_competing)
            for head in range(2):
                own = tokens[index, head][:num_competing]
                present = slice(int(absent[index, head]), None)
                expected = score_alone(index, head)[own]
                torch.testing.assert_close(numbers[head][present], expected[present])
                places = torch.randperm(num_competing - present.start, generator=generator)
                kept = (places[: keep + index + 2 * head] + present.start).sort().values
                self.held[index, head] = [own[place] for place in kept.tolist()]
                retained.append((index, (head * num_competing + kept)))
        if together:
            shifted = [2 * index * num_competing + kept for index, kept in retained]
            self.memory.retain(0, num_competing, torch.cat(shifted))
        else:
            for index in range(NUM_LAYERS):
                own_layer = torch.cat([kept for layer, kept in retained if layer == index])
                self.memory.retain(index, num_competing, own_layer)
        self.memory.settle(position, num_competing)
        self.num_seen = begin_of_tail

    def _complete(
        self, index: int, tokens: dict[tuple[int, int], list[int]], num_competing: int
    ) -> torch.Tensor:
        layer = PROBED[index]
        key, value = (
            torch.stack([part[head, tokens[index, head]] for head in range(2)])
            for part in (layer.key, layer.value)
        )
        given = ScoringInputs(
            layer.query[:0],
            key,
            value[:, :num_competing],
            1.0,
            layer_index=index,
            rotation=rotation(PROBE_SHAPE.head_size),
            probe=layer.probe,
        )

        def counted(function: Any) -> Any:
            def call(inputs: ScoringInputs, first_position: int) -> torch.Tensor:
                self.num_columns_scored.append(inputs.key.shape[1])
                assert inputs.value.shape[1] == inputs.key.shape[1]
                result: torch.Tensor = function(inputs, first_position)
                return result

            return call

        completed = self.memory.complete(given, counted)
        self.memory.keep(completed)
        assert completed.numbers is not None
        return completed.numbers


def score_alone(index: int, head: int) -> torch.Tensor:
    """What the probe says of all tokens of a head at their places, infinity for the first ones."""
    layer = PROBED[index]
    given = ScoringInputs(
        layer.query,
        layer.key[head : head + 1],
        layer.value[head : head + 1],
        1.0,
        rotation=rotation(PROBE_SHAPE.head_size),
        probe=layer.probe[:, head : head + 1],
    )
    (scores,) = probed_scores(given, 0)
    scores[:NUM_SINKS] = torch.inf
    return scores


@pytest.mark.parametrize("together", [False, True])
def test_every_token_is_scored_once_and_its_score_moves_with_it(together: bool) -> None:
    probed = Probed()
    probed.cut(8, 12, keep=4, together=together)
    probed.cut(24, 27, keep=6, together=together)
    probed.cut(60, 66, keep=9, together=together)
    probed.cut(60, 69, keep=3, together=together)  # no token competes for the first time
    # What was in a tail competes at the next cut, and nothing is scored again.
    assert probed.num_columns_scored == [8, 8, 16, 16, 36, 36]
