"""Compiles for an H100, without one, what the twins of CUDA launch; prints shared memory as JSON.

Run as a module in a fresh process, where Triton compiles: it calls the functions that launch, on
tensors of the host, and stops short of every launch. Nothing on the way depends on data.
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


class _Device:
    """What Triton asks its driver for before it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    triton.runtime.driver.set_active(_Device())
    run, shared = JITFunction.run, {}

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, warmup=True, **kwargs)
        name = f"{self.__module__.split('.')[-1]}.{self.__name__}"
        shared[name] = max(shared.get(name, 0), kernel.metadata.shared)
        return kernel

    JITFunction.run = compile_only
    for dtype, head_size in ((torch.bfloat16, 128), (torch.float16, 256), (torch.float32, 128)):
        launch_all(dtype, head_size)
    sys.stdout.write(json.dumps(shared))


def launch_all(dtype: torch.dtype, head_size: int) -> None:
    """Calls every twin once."""
    config = EvictionConfig()
    query = torch.empty(config.window, KV_HEADS * GROUP, head_size, dtype=dtype)
    key, value = torch.empty(2, NUM_TOKENS, KV_HEADS, head_size, dtype=dtype).transpose(1, 2)
    inputs = scoring_inputs(query, key, 1.0)
    cuda.snapkv_scores(inputs, config)
    cuda.snapkv_scores(replace(inputs, num_absent=torch.zeros(KV_HEADS, dtype=torch.int64)), config)
    turn = Rotation(*torch.empty(2, NUM_TOKENS, head_size // 2))
    probe = torch.empty((GROUP + 2) * head_size + 1, KV_HEADS)
    queries = torch.empty(NUM_TOKENS, KV_HEADS * GROUP, head_size, dtype=dtype)
    prompt = scoring_inputs(queries, key, 1.0, value, rotated_by=turn, probe=probe)
    cuda.imitated_scores(prompt, 0)
    weight = torch.empty(KV_HEADS, head_size, GROUP, HIDDEN_SIZE, dtype=dtype)
    # As in `OutputProjection.of`, which would multiply for real.
    wide = torch.float32 if dtype == torch.float16 else dtype
    form = torch.empty(KV_HEADS, head_size, head_size, dtype=wide)
    projection = OutputProjection(weight, form, form.float())
    cuda.projected_value_norms(value, projection)
    scores, budgets = torch.zeros(KV_HEADS, NUM_TOKENS), torch.full((KV_HEADS,), 1024)
    stage_1 = cuda.stage_1_mask(scores, budgets, 0.5)
    needed_value_norms(scores, value, projection, stage_1, budgets, 1e-4)
    cuda.adaptive_pages(scores, 64, BLOCK_SIZE, config)
    retained = cuda.select(scores, budgets, KV_HEADS * 1024)
    cuda.gather_entries(key, retained, NUM_TOKENS)
    cache = torch.empty(4, KV_HEADS, BLOCK_SIZE, 2 * head_size, dtype=dtype)
    blocks = torch.zeros(NUM_TOKENS // BLOCK_SIZE, dtype=torch.int32)
    entries = cuda.gather_from_blocks(cache, blocks, retained, NUM_TOKENS)
    cuda.scatter_entries(cache, retained, entries)
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
    segments = cuda.extremes(queries.transpose(0, 1), 512)
    num_before = torch.ones(NUM_TOKENS // 512, dtype=torch.int64)
    cuda.criticality(segments, blocks_of_keys, 1.0, num_before)


if __name__ == "__main__":
    main()
