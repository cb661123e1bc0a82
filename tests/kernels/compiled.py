"""Compiles for given cards, without one, what the twins of CUDA launch; prints shared memory.

Run as a module in a fresh process, where Triton compiles: it calls the functions that launch, on
tensors of the host, and stops short of every launch. Nothing on the way depends on data. Arguments
are compute capabilities such as 90; printed is, as JSON, the most shared memory of each kernel.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests.strategies import scoring_inputs
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels import cuda
from vllm_kvselect.kernels.triton.pruning import needed_value_norms
from vllm_kvselect.paging.page_table import PageTable
from vllm_kvselect.scoring.rotation import Rotation
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
        return {"max_shared_mem": SHARED_BYTES[device]}

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
            launch_quantized(head_size, capability)
        if SHARED_BYTES[capability] == min(SHARED_BYTES.values()):
            launch_products(torch.float32, 256)
    sys.stdout.write(json.dumps(shared))


def launch_quantized(head_size: int, capability: int) -> None:
    """Calls what moves entries of an fp8 cache, and what may read them where Triton knows fp8.

    The engine widens them before they are scored, on every card.
    """
    config, dtype = EvictionConfig(), torch.float8_e4m3fn
    query = torch.empty(config.window, KV_HEADS * GROUP, head_size, dtype=torch.bfloat16)
    key = torch.empty(KV_HEADS, NUM_TOKENS, head_size, dtype=dtype)
    if capability >= 89:
        cuda.mean_attention(scoring_inputs(query, key, 1.0), config)
    move(dtype, key, torch.zeros(64, dtype=torch.int64))


def launch_products(dtype: torch.dtype, head_size: int) -> None:
    """Calls what multiplies tiles."""
    config = EvictionConfig()
    query = torch.empty(config.window, KV_HEADS * GROUP, head_size, dtype=dtype)
    key = torch.empty(KV_HEADS, NUM_TOKENS, head_size, dtype=dtype)
    cuda.mean_attention(scoring_inputs(query, key, 1.0), config)
    scores, budgets = torch.zeros(KV_HEADS, NUM_TOKENS), torch.full((KV_HEADS,), 1024)
    stage_1 = torch.zeros(KV_HEADS, NUM_TOKENS, dtype=torch.bool)
    needed_value_norms(scores, key, projection_of(dtype, head_size), stage_1, budgets, 1e-4)


def projection_of(dtype: torch.dtype, head_size: int) -> OutputProjection:
    """A W_O as in `OutputProjection.of`, which would multiply for real."""
    weight = torch.empty(KV_HEADS, head_size, GROUP, HIDDEN_SIZE, dtype=dtype)
    wide = torch.float32 if dtype == torch.float16 else dtype
    form = torch.empty(KV_HEADS, head_size, head_size, dtype=wide)
    return OutputProjection(weight, form, form.float())


def move(dtype: torch.dtype, key: torch.Tensor, retained: torch.Tensor) -> None:
    """Calls what moves entries."""
    cuda.gather_entries(key, retained, NUM_TOKENS)
    cache = torch.empty(4, KV_HEADS, BLOCK_SIZE, 2 * key.shape[2], dtype=dtype)
    blocks = torch.zeros(NUM_TOKENS // BLOCK_SIZE, dtype=torch.int32)
    entries = cuda.gather_from_blocks(cache, blocks, retained, NUM_TOKENS)
    cuda.scatter_entries(cache, retained, entries)


def launch_all(dtype: torch.dtype, head_size: int) -> None:
    """Calls every twin once."""
    config = EvictionConfig()
    query = torch.empty(config.window, KV_HEADS * GROUP, head_size, dtype=dtype)
    key, value = torch.empty(2, NUM_TOKENS, KV_HEADS, head_size, dtype=dtype).transpose(1, 2)
    inputs = scoring_inputs(query, key, 1.0)
    cuda.snapkv_scores(inputs, config)
    cuda.snapkv_scores(replace(inputs, num_absent=torch.zeros(KV_HEADS, dtype=torch.int64)), config)
    turn = Rotation(*torch.empty(2, NUM_TOKENS, head_size // 2))
    probe = torch.empty(2 * head_size + 1, KV_HEADS)
    prompt = scoring_inputs(query, key, 1.0, value, rotated_by=turn, probe=probe)
    cuda.probed_scores(prompt, 0)
    projection = projection_of(dtype, head_size)
    cuda.projected_value_norms(value, projection)
    scores, budgets = torch.zeros(KV_HEADS, NUM_TOKENS), torch.full((KV_HEADS,), 1024)
    stage_1 = cuda.stage_1_mask(scores, budgets, 0.5)
    needed_value_norms(scores, value, projection, stage_1, budgets, 1e-4)
    cuda.adaptive_pages(scores, 64, BLOCK_SIZE, config)
    retained = cuda.select(scores, budgets, KV_HEADS * 1024)
    move(dtype, key, retained)
    blocks = torch.zeros(NUM_TOKENS // BLOCK_SIZE, dtype=torch.int32)
    integers = torch.zeros(2, dtype=torch.int32)
    out = PageTable(
        torch.zeros(1, 2 * KV_HEADS, 600, dtype=torch.int32),
        torch.zeros(1, 2 * KV_HEADS, dtype=torch.int32),
    )
    offsets = torch.zeros(1, 2, KV_HEADS + 1, dtype=torch.int32)
    cuda.headwise_page_table(
        blocks.view(1, -1).expand(2, -1),
        integers,
        integers,
        integers,
        offsets,
        BLOCK_SIZE,
        1000,
        0,
        out,
    )
    blocks_of_keys = cuda.extremes(key, 32)
    queries = torch.empty(NUM_TOKENS, KV_HEADS * GROUP, head_size, dtype=dtype)
    segments = cuda.extremes(queries.transpose(0, 1), 512)
    num_before = torch.ones(NUM_TOKENS // 512, dtype=torch.int64)
    cuda.criticality(segments, blocks_of_keys, 1.0, num_before)


if __name__ == "__main__":
    main([*map(int, sys.argv[1:])])
