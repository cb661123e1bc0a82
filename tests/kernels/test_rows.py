"""Rows of several requests: scored, and chosen from, as each layer of each request alone."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.kernels.world import World
from tests.method_cases import METHOD_CASES, MethodCase
from vllm_kvselect.choice import Retention, Sizes, choose, score
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels import rows
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.registry import METHODS
from vllm_kvselect.scoring import (
    at_random,
    defensivekv,
    keydiff,
    knorm,
    probe,
    r_kv,
    snapkv,
    streaming_llm,
)
from vllm_kvselect.scoring.held import Held, stacked
from vllm_kvselect.scoring.inputs import Scorer, absent_columns
from vllm_kvselect.selecting.ranking import Candidates

pytest.importorskip("triton")
from tests.kernels import interpreter
from vllm_kvselect.kernels import cuda
from vllm_kvselect.kernels.triton import allocation as allocation_kernels
from vllm_kvselect.kernels.triton import keydiff as keydiff_kernels
from vllm_kvselect.kernels.triton import selection as selection_kernels
from vllm_kvselect.kernels.triton import window_attention as attention_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreter.quicken()

SCORERS: tuple[tuple[Scorer, dict[str, object]], ...] = (
    (snapkv.snapkv_scores, {"kernel_size": 7}),
    (snapkv.snapkv_scores, {"kernel_size": 3, "pooling": "mean", "group_reduction": "max"}),
    (defensivekv.mean_attention, {}),
    (defensivekv.defensive_scores, {"kernel_size": 5}),
    (keydiff.keydiff_scores, {}),
    (probe.probe_scores, {}),
    (knorm.knorm_scores, {}),
    (at_random.random_scores, {"seed": 5}),
    (streaming_llm.streaming_llm_scores, {}),
    (r_kv.r_kv_scores, {"kernel_size": 5, "r_kv_threshold": 0.3}),
)
WORLDS = {
    "even": World((2, 4), (5, 3), num_kv_heads=2, device=DEVICE),
    "side by side": World((2, 4), (5, 3), num_layers=3, alike=True, device=DEVICE),
    "uneven, side by side": World((2, 4), (5, 3), alike=True, absent=True, device=DEVICE),
    "uneven": World((2, 4), (5, 3), num_kv_heads=2, absent=True, device=DEVICE),
    "fp8": World((2, 4), (5, 3), num_kv_heads=2, cache_dtype=torch.float8_e4m3fn, device=DEVICE),
    "bfloat16": World((3,), (4,), num_layers=1, dtype=torch.bfloat16, device=DEVICE),
}
SERVED = [case for case in METHOD_CASES if case.method in METHODS]


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    """Tiles so small that a row spans several."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(selection_kernels, "_LARGEST_BLOCK", 64)
            patch.setattr(allocation_kernels, "_BLOCK", 32)
            patch.setattr(allocation_kernels, "_CELLS", 16)
            patch.setattr(attention_kernels, "_LEAST_SPLIT", 16)
            patch.setattr(keydiff_kernels, "_PART", 32)
            patch.setattr(keydiff_kernels, "_TOKENS", 16)
        yield


def present(held: Held, scores: torch.Tensor) -> torch.Tensor:
    """What is said of entries that there are."""
    is_absent = absent_columns(held.num_absent, held.num_competing)
    return scores.double().masked_fill(is_absent, 0)


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize(
    ("scorer", "values"), SCORERS, ids=lambda each: getattr(each, "__name__", "")
)
def test_rows_are_scored_through_their_pages(
    scorer: Scorer, values: dict[str, object], world: World
) -> None:
    """Layers differ in scale, sinks, probe and rotation, and no page is another's.

    What is expected is computed row by row, from entries that are read by the layer's own reader.
    """
    config = EvictionConfig.parse({"method": "snapkv", "window": world.window, **values})
    numbers = scorer is probe.probe_scores and world.absent
    held, exact = world.held(numbers=numbers), world.held(wide=True, numbers=numbers)
    exact = replace(exact, make_paged=None)
    found = present(held, rows.scores(cuda.KERNELS, scorer, held, config))
    expected = present(held, rows.scores(REFERENCES, scorer, exact, config))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_norms_of_rows_are_those_of_their_layers(world: World) -> None:
    held, exact = world.held(), world.held(wide=True)
    found, expected = (rows.value_norms(*of) for of in ((cuda.KERNELS, held), (REFERENCES, exact)))
    torch.testing.assert_close(present(held, found), present(held, expected), rtol=1e-5, atol=0)


def test_as_many_layers_stand_side_by_side_as_memory_allows() -> None:
    """Never those of two requests, nor layers that scale attention differently."""
    alike = World((2, 4), (5, 3), num_layers=3, alike=True).held()
    of_layer = alike.pages[0].numel() * alike.paged.memory[0].nbytes
    others = World((2, 4), (5, 3), num_layers=3).held()

    def sizes(held: Held, most_bytes: int) -> list[int]:
        return [rows.stop - rows.start for rows, _ in held.rows(most_bytes)]

    assert sizes(alike, 3 * of_layer) == [3, 3]
    assert sizes(alike, 3 * of_layer - 1) == [2, 1, 2, 1]
    assert sizes(alike, 0) == sizes(alike, 1) == sizes(others, 3 * of_layer) == [1] * 6


@pytest.mark.parametrize("absent", [False, True])
def test_a_row_is_read_in_its_requests_own_columns(absent: bool) -> None:
    world = World(absent=absent)
    held, memory = world.held(), world.memory
    for index in range(held.num_rows):
        request, inputs = index // held.num_layers, held.row(index)
        assert inputs.layer_index == index % held.num_layers
        missing = held.num_missing[request]
        num_own = world.lengths[request] * world.block_size
        assert inputs.value.shape[1] == num_own == held.num_competing - missing
        assert inputs.key.shape[1] == num_own + world.behind[request]
        for head in range(held.num_kv_heads):
            first = 0 if inputs.num_absent is None else int(inputs.num_absent[head])
            assert first + missing == held.num_absent[index, head]
            for column in (first, num_own - 1):
                page = held.pages[index, head, (missing + column) // world.block_size]
                entry = memory[page, column % world.block_size]
                assert torch.equal(inputs.key[head, column], entry[: world.head_size])
                assert torch.equal(inputs.value[head, column], entry[world.head_size :])


def chosen(held: Held, num_packed: list[int], case: MethodCase, kernels: Kernels) -> Retention:
    config = case.config(window=3)
    sizes = Sizes(num_packed, 8)
    return choose(held, score(held, config, kernels), sizes, config, kernels)


def alone(world: World, num_packed: list[int], case: MethodCase) -> Retention:
    """What each request retains by itself, put together."""
    together, retained, offsets = world.held(), [], []
    num_layers, num_competing = together.num_layers, together.num_competing
    for request, num in enumerate(num_packed):
        first = request * num_layers
        one = Held.of([together.row(first + layer) for layer in range(num_layers)])
        kept, of_heads = chosen(one, [num], case, REFERENCES)
        owner, column = kept // one.num_competing, kept % one.num_competing
        owner += first * together.num_kv_heads
        retained.append(owner * num_competing + column + together.num_missing[request])
        offsets.append(of_heads)
    return Retention(torch.cat(retained), torch.cat(offsets))


@pytest.mark.parametrize(
    ("case", "absent"),
    [
        pytest.param(case, absent, id=f"{case.name}{'-uneven' if absent else ''}")
        for case in SERVED
        for absent in (False, True)
        if not absent or METHODS[case.method].in_rounds
    ],
)
def test_requests_of_a_pass_retain_what_each_would_alone(case: MethodCase, absent: bool) -> None:
    # Even heads may lose a third of the others' pages; a head that lacks some has enough for one.
    world, num_packed = World(absent=absent), [1, 1, 1] if absent else [1, 3, 2]
    expected = alone(world, num_packed, case)
    found = chosen(world.held(), num_packed, case, REFERENCES)
    assert torch.equal(found.offsets, expected.offsets)
    assert torch.equal(found.retained, expected.retained)


TWINS = ("layer-probe", "snapkv", "adakv-perturb", "thetakv", "layer-keydiff")
LARGER = ("defensivekv", "pyramidkv", "ada-pyramidkv-perturb", "layer-defensivekv")


@pytest.mark.parametrize("method", [*TWINS, *LARGER])
def test_twins_choose_what_references_choose(method: str) -> None:
    """Rounding may swap entries on the cut; every other choice is the same."""
    world, num_packed = World((2, 4), (5, 3), num_kv_heads=2, device=DEVICE), [1, 2]
    case = MethodCase(method)
    expected = chosen(world.held(), num_packed, case, REFERENCES)
    found = chosen(world.held(), num_packed, case, cuda.KERNELS)
    assert torch.equal(found.offsets, expected.offsets)
    both = {*found.retained.tolist()} & {*expected.retained.tolist()}
    assert len(both) >= expected.retained.numel() - 1


def test_the_same_number_of_ties_is_taken_of_256_heads_in_each_layer() -> None:
    world, config = World((3,), (3,), num_kv_heads=256, group=1), EvictionConfig(method="keydiff")
    held = world.held()
    scores = (torch.rand(2, 256, 24, generator=torch.Generator().manual_seed(0)) * 3).round()
    found, expected = (
        choose(held, Candidates(scores), Sizes([1], 8), config, kernels)
        for kernels in (cuda.KERNELS, REFERENCES)
    )
    assert torch.equal(found.offsets, expected.offsets)
    assert torch.equal(found.retained, expected.retained)


def test_what_lies_side_by_side_is_stacked_without_a_copy() -> None:
    whole = torch.rand(4, 3, 2)
    assert stacked([*whole]).data_ptr() == whole.data_ptr()
    assert torch.equal(stacked([*whole]), whole)
    apart = [whole[2], whole[0], whole[1]]
    assert torch.equal(stacked(apart), whole[[2, 0, 1]])
    assert torch.equal(stacked([*whole.transpose(1, 2)]), whole.transpose(1, 2))
