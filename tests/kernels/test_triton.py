"""The kernels in Triton compute what their references compute: in its interpreter, or on a GPU."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.kernels.backend import Backend, behind_stage_1, of_values
from tests.kernels.twins import *  # noqa: F403 (tests)
from tests.kernels.unsynchronised import SYNCHRONISING, SynchronisationError, unsynchronised
from tests.method_cases import SERVED_CASES, MethodCase
from tests.strategies import Shape, random_layer, scoring_inputs
from tests.test_page_table import Batch, orders_of
from tests.uneven import ROUND_CASES
from vllm_kvselect.choice import retain
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.paging import compaction
from vllm_kvselect.paging.page_table import PageTable
from vllm_kvselect.scoring import snapkv
from vllm_kvselect.scoring.probe import num_features
from vllm_kvselect.scoring.value_norms import OutputProjection
from vllm_kvselect.selecting import selection

pytest.importorskip("triton")
from tests.kernels import interpreter
from vllm_kvselect.kernels import cuda
from vllm_kvselect.kernels import triton as triton_kernels
from vllm_kvselect.kernels.triton import allocation as allocation_kernels
from vllm_kvselect.kernels.triton import criticality as criticality_kernels
from vllm_kvselect.kernels.triton import keydiff as keydiff_kernels
from vllm_kvselect.kernels.triton import longest_first as order_kernels
from vllm_kvselect.kernels.triton import page_table as page_table_kernels
from vllm_kvselect.kernels.triton import pruning as pruning_kernels
from vllm_kvselect.kernels.triton import selection as selection_kernels
from vllm_kvselect.kernels.triton import window_attention as attention_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [
    importlib.import_module(module.name)
    for module in pkgutil.iter_modules(triton_kernels.__path__, f"{triton_kernels.__name__}.")
]


def needed_value_norms(
    weights: torch.Tensor,
    value: torch.Tensor,
    projection: OutputProjection,
    stage_1: torch.Tensor,
    budgets: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Those of one layer."""
    held = of_values(value, projection)
    given = weights[None], stage_1[None], budgets, eps
    return pruning_kernels.needed_value_norms(held, *given)[0]


BACKEND = Backend(
    cuda.KERNELS,
    cuda,
    behind_stage_1(needed_value_norms),
    (MethodCase("adakv-perturb"), MethodCase("thetakv")),
    num_examples=12,  # the interpreter takes about 10 ms for each program of a grid
    device=DEVICE,
    # Tiles of other rows may be summed in another order.
    norms_rtol=256 * torch.finfo(torch.float32).eps,
)
interpreter.quicken()


@pytest.fixture(scope="module", autouse=True)
def backend() -> Iterator[Backend]:
    """Tiles so small that inputs of tests span several; on a GPU they are as they are served."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(selection_kernels, "_LARGEST_BLOCK", 64)
            patch.setattr(allocation_kernels, "_BLOCK", 32)
            patch.setattr(allocation_kernels, "_CELLS", 1024)
            patch.setattr(attention_kernels, "_LEAST_SPLIT", 64)
            patch.setattr(keydiff_kernels, "_PART", 64)
            patch.setattr(page_table_kernels, "_BLOCK", 4)
            patch.setattr(order_kernels, "_BLOCK", 4)
            patch.setattr(criticality_kernels, "_BLOCKS", 16)
            patch.setattr(criticality_kernels, "_TOKENS", 8)
        yield BACKEND


def test_of_the_window_alone_nothing_is_scored() -> None:
    inputs = scoring_inputs(
        torch.ones(3, 2, 16, device=DEVICE), torch.ones(1, 3, 16, device=DEVICE)
    )
    scores = BACKEND.scores(
        snapkv.snapkv_scores, inputs, EvictionConfig(method="adakv-perturb", window=3)
    )
    assert scores.shape == (1, 0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_keys_of_an_fp8_cache_are_scored_as_the_numbers_that_they_stand_for(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, 16, generator=generator).bfloat16().to(DEVICE)
    key = torch.randn(2, 60, 16, generator=generator).to(dtype).to(DEVICE)
    config = EvictionConfig(method="adakv-perturb", window=3)
    expected = snapkv.snapkv_scores(scoring_inputs(query.double(), key.double(), 0.25), config)
    scores = BACKEND.scores(snapkv.snapkv_scores, scoring_inputs(query, key, 0.25), config)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=0)


def test_norms_whose_bounds_come_second_are_found() -> None:
    """Bounds are loose for values that reach one hidden channel, tight where they reach all."""
    hidden_size = 64
    weight = torch.zeros(1, 2, 1, hidden_size, device=DEVICE)
    weight[0, 0, 0, 0], weight[0, 1] = hidden_size**0.5, 1.0
    value = torch.zeros(1, 80, 2, device=DEVICE)
    value[0, :40, 0], value[0, 40:60, 1], value[0, 60:, 1] = 1.1, 1.0, 0.1
    scores, budgets = torch.ones(1, 80, device=DEVICE), torch.tensor([10], device=DEVICE)
    stage_1 = selection.best_mask(scores, torch.zeros_like(budgets))
    projection = OutputProjection.of(weight)
    norms = needed_value_norms(scores, value, projection, stage_1, budgets, 0.0)
    assert norms.count_nonzero() == 60
    retained = cuda.select(selection.stage_2_keys(scores, norms, stage_1, 0.0), budgets, 10)
    assert retained.tolist() == list(range(40, 50))


@pytest.mark.parametrize(
    ("case", "absent"),
    [
        *(pytest.param(case, None, id=case.name) for case in SERVED_CASES),
        *(pytest.param(case, [16, 40], id=f"{case.name}-uneven") for case in ROUND_CASES),
    ],
)
def test_the_whole_choice_waits_for_nothing_and_is_the_references(
    case: MethodCase, absent: list[int] | None
) -> None:
    """Rounding may swap entries on the cut; every other choice is the same."""
    shape = Shape(2, 2, 8, 8, 3, 75, 3)
    layer = random_layer(shape, 5, torch.float32)
    value = layer.value[:, : shape.num_tokens].to(DEVICE)
    projection = OutputProjection.of(layer.output_projection.to(DEVICE))
    query, key = layer.query.to(DEVICE), layer.key.to(DEVICE)
    inputs = scoring_inputs(query, key, shape.scale, value, projection)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(num_features(shape.head_size), shape.num_kv_heads, generator=generator)
    inputs = replace(inputs, probe=probe.to(DEVICE))
    if absent is not None:
        inputs = replace(inputs, num_absent=torch.tensor(absent).to(DEVICE))
    arguments = ([inputs], 3, 8, case.config(window=shape.window))
    expected = retain(*arguments)
    with unsynchronised():
        retention = retain(*arguments, kernels=cuda.KERNELS)
    assert torch.equal(retention.offsets, expected.offsets)
    both = set(retention.retained.tolist()) & set(expected.retained.tolist())
    assert len(both) >= expected.retained.numel() - 1


def test_compaction_and_page_tables_wait_for_nothing() -> None:
    batch = Batch(4, 2, [[0, 3, 8, 6, 4]], [18], [1], [3], [[[3, 1]]])
    *tensors, block_size, num_blocks, first_layer = batch.inputs()
    inputs = [part.to(DEVICE) for part in tensors]
    buffers = PageTable(*(part.to(DEVICE) for part in batch.buffers(2)))
    out = PageTable(*(part[:, :-1] for part in buffers))
    orders = orders_of(batch, DEVICE)
    cache = torch.zeros(9, 2, 4, 16, device=DEVICE)
    retained = torch.arange(16, device=DEVICE)
    blocks = torch.tensor([7, 3, 8], device=DEVICE)
    pages = compaction.head_pages(blocks, 2)
    with unsynchronised():
        cuda.move_retained(cache, pages, retained, 12, blocks[1:])
        cuda.longest_first(inputs[1], inputs[3], inputs[4], block_size, orders)
        order = orders.sequences[:, :-1]
        cuda.headwise_page_table(*inputs, block_size, num_blocks, first_layer, out, order)


@pytest.mark.parametrize("synchronise", SYNCHRONISING.values(), ids=SYNCHRONISING)
def test_the_guard_finds_synchronisations(synchronise: Callable[[torch.Tensor], object]) -> None:
    numbers = torch.tensor([1.0, 2.0]).to(DEVICE)
    with unsynchronised():
        numbers.sort(stable=True)
        torch.nonzero_static(numbers, size=1)
    with pytest.raises(SynchronisationError if DEVICE == "cpu" else RuntimeError), unsynchronised():
        synchronise(numbers)
