"""What is launched for a cut does not grow with layers and requests."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")
from tests.launches import recorded
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.kernels import cuda
from vllm_kvselect.paging import compaction
from vllm_kvselect.selecting.selection import stage_1_counts

NUM_HEADS, NUM_TOKENS, BLOCK_SIZE, NUM_PACKED = 8, 4096, 32, 16
SIZES = [(1, 1), (4, 1), (32, 1), (4, 8), (32, 8)]
"""Layers, and requests that are due."""

BLENDED, LEAST = (
    EvictionConfig(method="adakv-perturb"),
    EvictionConfig(method="adakv-perturb", floor="minimum"),
)


def segments(num_layers: int, num_requests: int) -> torch.Tensor:
    """Scores, each layer of a request by itself."""
    return torch.empty(num_layers * num_requests, NUM_HEADS, NUM_TOKENS, device="meta")


def pools(num_layers: int, num_requests: int) -> torch.Tensor:
    """Scores, all layers of a request together."""
    return torch.empty(num_requests, num_layers * NUM_HEADS, NUM_TOKENS, device="meta")


def heads(num_layers: int, num_requests: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of all heads, and their budgets."""
    num_heads = num_layers * num_requests * NUM_HEADS
    scores = torch.empty(num_heads, NUM_TOKENS, device="meta")
    return scores, torch.empty(num_heads, dtype=torch.int64, device="meta")


def allocate(name: str, scores: torch.Tensor, config: EvictionConfig = BLENDED) -> None:
    """Calls an allocator, with other numbers of packed blocks for each segment."""
    num_packed = [NUM_PACKED + index % 3 for index in range(len(scores))]
    getattr(cuda.KERNELS, name)(scores, num_packed, BLOCK_SIZE, config)


def select(num_layers: int, num_requests: int) -> None:
    scores, budgets = heads(num_layers, num_requests)
    cuda.KERNELS.select(scores, budgets, NUM_PACKED * BLOCK_SIZE * len(scores))


def mask(num_layers: int, num_requests: int) -> None:
    scores, budgets = heads(num_layers, num_requests)
    cuda.KERNELS.best_mask(scores, stage_1_counts(budgets, 0.5, num_first=4))


def move(num_layers: int, num_requests: int) -> None:
    num_rows = num_layers * num_requests
    memory = torch.empty(4, NUM_HEADS, BLOCK_SIZE, 256, dtype=torch.bfloat16, device="meta")
    pages, blocks, retained = (
        torch.empty(shape, dtype=torch.int64, device="meta")
        for shape in (
            (num_rows * NUM_HEADS, NUM_TOKENS // BLOCK_SIZE),
            (num_rows * NUM_PACKED,),
            (num_rows * NUM_PACKED * NUM_HEADS * BLOCK_SIZE,),
        )
    )
    cuda.KERNELS.move_retained(memory, pages, retained, NUM_TOKENS, blocks)


def store(num_layers: int, num_requests: int) -> None:
    state = RetentionState(10, num_layers, NUM_HEADS, "meta")
    keys = torch.empty(num_requests, dtype=torch.int64, device="meta")
    shape = num_requests, num_layers, NUM_HEADS + 1
    state.store(keys, torch.empty(shape, dtype=torch.int64, device="meta"))


def raise_best(num_layers: int, num_requests: int) -> None:
    cuda.KERNELS.best_first(pools(num_layers, num_requests), [BLOCK_SIZE] * num_requests)


PARTS: dict[str, tuple[Callable[[int, int], None], int]] = {
    "uniform": (lambda *sizes: allocate("uniform_pages", segments(*sizes)), 2),
    "adaptive": (lambda *sizes: allocate("adaptive_pages", segments(*sizes)), 8),
    "adaptive, a least": (lambda *sizes: allocate("adaptive_pages", segments(*sizes), LEAST), 10),
    "shared": (lambda *sizes: allocate("shared_pages", pools(*sizes)), 8),
    "best first": (raise_best, 2),
    "selection": (select, 2),
    "stage 1": (mask, 6),
    "offsets": (store, 3),
}
"""Parts of a cut, and how many launches each takes."""


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_part_of_a_cut_takes_as_many_launches_whatever_the_layers_and_requests(
    part: str, sizes: tuple[int, int]
) -> None:
    call, expected = PARTS[part]
    with recorded() as launches:
        call(*sizes)
    assert len(launches) == expected, launches


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_moving_takes_two_launches_for_each_256_mib(sizes: tuple[int, int]) -> None:
    num_bytes = sizes[0] * sizes[1] * NUM_PACKED * NUM_HEADS * BLOCK_SIZE * 512
    with recorded() as launches:
        move(*sizes)
    assert len(launches) == 2 * -(-num_bytes // compaction.MOST_BYTES), launches


def test_views_and_allocations_are_no_launches() -> None:
    tensor, on_host = torch.empty(4, 6, device="meta"), torch.zeros(3)
    with recorded() as launches:
        tensor[1:].t().unsqueeze(0).flatten(1).unfold(1, 2, 1).expand(3, -1, -1, -1)
        torch.empty_like(tensor).new_empty(3).view(1, 3)
        on_host + 1
        assert launches == ["aten.clone.default"]  # `flatten` of what is not contiguous
        tensor + 1
        on_host.to("meta")
        torch.zeros(3, device="meta")
    assert launches[1:] == ["aten.add.Tensor", "aten._to_copy.default", "aten.zeros.default"]
