"""Compiles for given cards, without one, what the twins of CUDA launch; prints shared memory.

Run as a module in a fresh process, where Triton compiles: it calls the functions that launch, on
tensors of the host, and stops short of every launch. Nothing on the way depends on data. Arguments
are compute capabilities such as 90; printed is, as JSON, the most shared memory of each kernel.
"""

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels import cuda
from vllm_kvselect.paging.order import Orders, Schedules, Sharing
from vllm_kvselect.paging.page_table import PageTable
from vllm_kvselect.scoring.held import Held, Paged
from vllm_kvselect.scoring.value_norms import OutputProjection

KV_HEADS, GROUP, HIDDEN_SIZE, NUM_TOKENS, BLOCK_SIZE = 8, 4, 4096, 8192, 16
"""A layer of an 8B Llama, and a prompt."""


SHARED_BYTES = {
    80: 163 * 2**10,
    86: 99 * 2**10,
    89: 99 * 2**10,
    90: 227 * 2**10,
    100: 227 * 2**10,
    120: 99 * 2**10,
}
"""The most shared memory of a block, by compute capability (CUDA's programming guide, table 27)."""

TIGHTEST = 89
"""The card with least memory for which every kernel is compiled at every head size."""


class Device:
    """What Triton asks its driver for before it launches.

    Args:
        capability: Of the card; its number, too.
    """

    def __init__(self, capability: int = 90) -> None:
        self._capability = capability
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES[device], "multiprocessor_count": 132}

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


def main(capabilities: list[int]) -> None:
    run, shared = JITFunction.run, dict[int, dict[str, int]]()

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, warmup=True, **kwargs)
        name = f"{self.__module__.split('.')[-1]}.{self.__name__}"
        of_card = shared.setdefault(kernel.metadata.target.arch, {})
        of_card[name] = max(of_card.get(name, 0), kernel.metadata.shared)
        return kernel

    JITFunction.run = compile_only
    for capability in capabilities:
        triton.runtime.driver.set_active(Device(capability))
        for head_size in (64, 128, 256):
            if head_size == 128 or capability == TIGHTEST:
                launch_all(torch.bfloat16, head_size)
            else:
                launch_products(torch.bfloat16, head_size)
            launch_quantized(head_size)
        if SHARED_BYTES[capability] == min(SHARED_BYTES.values()):
            launch_products(torch.float32, 256)
    sys.stdout.write(json.dumps(shared))


def held_of(
    dtype: torch.dtype, head_size: int, is_quantized: bool = False, rotated: bool = True
) -> Held:
    """What a request of one layer holds, with all that a layer may have."""
    pages = torch.zeros(1, KV_HEADS, NUM_TOKENS // BLOCK_SIZE, dtype=torch.int64)
    stored = torch.uint8 if is_quantized else dtype
    turns = torch.empty(2, 1, NUM_TOKENS, head_size // 2 if rotated else 0)
    paged = Paged(
        torch.empty(4, BLOCK_SIZE, 2 * head_size, dtype=stored),
        dtype,
        torch.empty(1, 2, 256, dtype=dtype) if is_quantized else None,
        torch.ones(1),
        torch.empty(1, KV_HEADS * GROUP, dtype=dtype),
        torch.empty(1, KV_HEADS, 2 * head_size + 1),
        (turns[0], turns[1]),
        torch.zeros(1, dtype=torch.int32),
        False,
        OutputProjection(*(part[None] for part in projection_of(dtype, head_size)[:2])),
    )
    window, num_competing = (
        EvictionConfig(method="adakv-perturb").window,
        NUM_TOKENS - BLOCK_SIZE * 4,
    )
    query = torch.empty(1, 1, window, KV_HEADS * GROUP, head_size, dtype=dtype)
    absent = torch.zeros(1, KV_HEADS, dtype=torch.int64)
    given = num_competing, BLOCK_SIZE, [0], [window + 3], True, query, None, [0], [0]
    nobody: Any = None  # no layer is read by itself
    return Held([nobody], pages, absent, *given, lambda: paged)


def launch_quantized(head_size: int) -> None:
    """Calls what reads and moves entries of an fp8 cache: bytes, whatever Triton knows of fp8."""
    launch_products(torch.bfloat16, head_size, is_quantized=True)
    move(torch.float8_e4m3fn, head_size)


def launch_products(dtype: torch.dtype, head_size: int, is_quantized: bool = False) -> None:
    """Calls what multiplies tiles."""
    held, config = held_of(dtype, head_size, is_quantized), EvictionConfig(method="adakv-perturb")
    scores = cuda.snapkv_scores(held, config)
    budgets = torch.full((KV_HEADS,), 1024)
    cuda.select_pruned(held, scores, scores, budgets, [KV_HEADS * 1024], budgets // 2, 1e-4)


def projection_of(dtype: torch.dtype, head_size: int) -> OutputProjection:
    """A W_O as in `OutputProjection.of`, which would multiply for real."""
    weight = torch.empty(KV_HEADS, head_size, GROUP, HIDDEN_SIZE, dtype=dtype)
    wide = torch.float32 if dtype == torch.float16 else dtype
    form = torch.empty(KV_HEADS, head_size, head_size, dtype=wide)
    return OutputProjection(weight, form)


def move(dtype: torch.dtype, head_size: int) -> None:
    """Calls what moves entries."""
    memory = torch.empty(4, KV_HEADS, BLOCK_SIZE, 2 * head_size, dtype=dtype)
    pages = torch.zeros(KV_HEADS, NUM_TOKENS // BLOCK_SIZE, dtype=torch.int64)
    retained = torch.zeros(64, dtype=torch.int64)
    cuda.move_retained(memory, pages, retained, NUM_TOKENS, pages[0])


def launch_all(dtype: torch.dtype, head_size: int) -> None:
    """Calls every twin once."""
    config = EvictionConfig(method="adakv-perturb")
    held = held_of(dtype, head_size)
    scores = cuda.snapkv_scores(held, config)
    cuda.mean_attention(held, config)
    cuda.defensive_scores(held, config)
    cuda.keydiff_scores(held, config)
    cuda.probe_scores(held, config)
    cuda.probe_scores(held_of(dtype, head_size, rotated=False), config)
    cuda.projected_value_norms(held)
    launch_products(dtype, head_size)
    scores, budgets = scores[0], torch.full((KV_HEADS,), 1024)
    cuda.KERNELS.adaptive_pages(scores[None], [64], BLOCK_SIZE, config)
    cuda.best_first(scores[None], [64])
    cuda.select(scores, budgets, KV_HEADS * 1024)
    move(dtype, head_size)
    blocks = torch.zeros(NUM_TOKENS // BLOCK_SIZE, dtype=torch.int32)
    integers = torch.zeros(2, dtype=torch.int32)
    out = PageTable(
        torch.zeros(1, 2 * KV_HEADS, 600, dtype=torch.int32),
        torch.zeros(1, 2 * KV_HEADS, dtype=torch.int32),
    )
    offsets = torch.zeros(1, 2, KV_HEADS + 1, dtype=torch.int32)
    places = torch.zeros(1, 2 * KV_HEADS + 1, dtype=torch.int32)
    sharing = Sharing(128, 132, 32, 3)
    numbers = torch.zeros(1, sharing.size(2 * KV_HEADS), dtype=torch.int32)
    for schedules in (None, Schedules(numbers, sharing)):
        orders = Orders(places, out.seq_lens, schedules)
        cuda.longest_first(integers, integers, offsets, BLOCK_SIZE, orders)
    table = blocks.view(1, -1).expand(2, -1)
    for order in (None, places[:, :-1]):
        given = table, integers, integers, integers, offsets, BLOCK_SIZE, 1000, 0, out, order
        cuda.headwise_page_table(*given)
    key = torch.empty(NUM_TOKENS, KV_HEADS, head_size, dtype=dtype).transpose(0, 1)
    blocks_of_keys = cuda.extremes(key, 32)
    queries = torch.empty(NUM_TOKENS, KV_HEADS * GROUP, head_size, dtype=dtype)
    segments = cuda.extremes(queries.transpose(0, 1), 512)
    num_before = torch.ones(NUM_TOKENS // 512, dtype=torch.int64)
    cuda.criticality(segments, blocks_of_keys, 1.0, num_before)


if __name__ == "__main__":
    main([*map(int, sys.argv[1:])])
