"""Launches the kernels of eviction once, before anyone waits for them.

Triton compiles a kernel when it is first launched, and while a graph is captured it cannot. What it
compiles for depends on a few sizes, so made-up requests of each kind run through all layers: all of
their blocks are the null block, which nobody reads.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.cuda.builder import CudaMetadataBuilder
from vllm_kvselect.engine.cuda.tables import table_width
from vllm_kvselect.engine.drop.request import Request
from vllm_kvselect.engine.notice import Swap
from vllm_kvselect.engine.step.split import Decodes
from vllm_kvselect.planning.cuts import Cut, cuts
from vllm_kvselect.planning.plan import Plan, plan
from vllm_kvselect.registry import METHODS
from vllm_kvselect.scoring.memory import StepQueries


def warm_up(builder: CudaMetadataBuilder, methods: Iterable[str], eviction: EvictionConfig) -> None:
    """Packs made-up prompts in all layers of a group, makes rounds, prefills sparsely, decodes."""
    for method in methods:
        update: dict[str, Any] = {"method": method, "prefill": "dense", "context": None}
        if "budget" in eviction.allow_override:  # as little as a request may ask for
            update |= {"budget": eviction.window + builder.block_size}
        config = eviction.model_copy(update=update)
        for num_tokens in _lengths(builder, config):
            request = Request(plan(config, None, None, num_tokens, builder.block_size))
            _prefill(builder, request)
            _make(builder, request, request.plan.cuts[0])
            _step(builder, request, num_tokens + 2, 2)  # past its prompt
        if eviction.may_drop_again and METHODS[method].in_rounds:
            for num_tokens in _lengths_before_rounds(builder):
                _make_rounds(builder, config, num_tokens)
    if eviction.may_prefill_sparsely:
        _prefill_sparsely(builder, eviction)
    # A row without a plan reads the null block's offsets, which made-up prompts have written.
    builder.state.clear()
    nothing = Request(Plan(0, eviction))
    _step(builder, nothing, 1, 1)
    decodes = Decodes.of([nothing], builder.state.version)
    batch = builder.tables.decode_batch(decodes, _common(builder, 1, 1), 0)
    for index in range(len(builder.layers)):
        builder.tables.of_layer(index, batch)
    if builder.graph_queries is not None:
        builder.graph_queries.want(None)


def _lengths(builder: CudaMetadataBuilder, config: EvictionConfig) -> list[int]:
    """Of prompts that drop entries: the shortest for each size of the kernels' tiles."""
    # Imports Triton, which is there on CUDA.
    from vllm_kvselect.kernels.triton.selection import row_block

    found: dict[int, int] = {}
    for length in _aligned(builder):
        if planned := cuts(length, builder.block_size, config):
            found.setdefault(row_block(planned[0].tail_start * builder.block_size), length)
    return [*found.values()]


def _lengths_before_rounds(builder: CudaMetadataBuilder) -> list[int]:
    """Of prompts that nothing was dropped from: one for each size of the kernels' tiles."""
    from vllm_kvselect.kernels.triton.selection import row_block

    return [*{row_block(length): length for length in (*reversed(_aligned(builder)), 1)}.values()]


def _aligned(builder: CudaMetadataBuilder) -> range:
    """Lengths of whole blocks that leave room for an answer."""
    limit = builder.vllm_config.model_config.max_model_len
    return range(builder.block_size, limit, builder.block_size)


def _prefill(builder: CudaMetadataBuilder, request: Request) -> None:
    """Computes a prompt, in as many chunks as the scheduler would make."""
    request.pause()
    size, num_tokens = builder.vllm_config.scheduler_config.max_num_batched_tokens, 0
    while num_tokens < request.plan.num_prompt_tokens:
        end = min(num_tokens + size, request.plan.num_prompt_tokens)
        if request.plan.segments is not None:
            end = request.plan.segments.last_border(end)
        _step(builder, request, end, end - num_tokens)
        num_tokens = end


def _step(builder: CudaMetadataBuilder, request: Request, num_tokens: int, num_new: int) -> None:
    """Computes the last `num_new` of so many tokens of a request in one step."""
    request.num_computed = num_tokens - num_new
    dtype = builder.vllm_config.model_config.dtype
    with builder.serving(request):
        metadata = builder.build(0, _common(builder, num_tokens, num_new))
    for layer in builder.layers:
        query, key, value, output = (
            torch.zeros(num_new, heads, layer.head_size, dtype=dtype, device=builder.device)
            for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads, layer.num_heads)
        )
        if layer.query_quant is not None:
            query = query.to(current_platform.fp8_dtype())
        layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, output)


def _make_rounds(
    builder: CudaMetadataBuilder, config: EvictionConfig, num_prompt_tokens: int
) -> None:
    """Makes the first two rounds of a request: before the second one its heads are uneven."""
    builder.state.clear()  # a request that has dropped nothing has no offsets
    longest, least = builder.vllm_config.model_config.max_model_len - 1, config.window
    budgets = {"budget": longest, "decode_budget": least + builder.block_size}
    config = config.model_copy(update=budgets)
    made = cuts(num_prompt_tokens, builder.block_size, config, longest - num_prompt_tokens)
    request = Request(Plan(num_prompt_tokens, config, made))
    _prefill(builder, request)
    for cut in made[:2]:
        _make(builder, request, cut)
        _step(builder, request, cut.position + 1, 1)


def _make(builder: CudaMetadataBuilder, request: Request, cut: Cut) -> None:
    """Makes a cut of a request between two steps."""
    first = request.first_query(cut)
    tokens = torch.zeros(cut.position - first, dtype=torch.int64, device=builder.device)
    seen = StepQueries(tokens, len(builder.layers))
    for index, layer in enumerate(builder.layers):
        shape = (1, layer.num_heads, layer.head_size)
        dtype = builder.vllm_config.model_config.dtype
        seen.see(index, torch.zeros(shape, dtype=dtype, device=builder.device))
    request.progress.queries.keep(seen, 0, first, cut.position)
    request.num_computed = cut.position
    num_blocks = -(-cut.position // builder.block_size)
    request.progress.swap = Swap([0] * num_blocks, [0] * cut.num_packed)
    builder.due.make([request])


def _prefill_sparsely(builder: CudaMetadataBuilder, eviction: EvictionConfig) -> None:
    """Prefills the shortest prompt that has sparse segments, whatever it retains."""
    config = eviction.model_copy(
        update={"method": "none", "prefill": "critiprefill", "context": None}
    )
    for length in _aligned(builder):
        made = plan(config, None, None, length, builder.block_size)
        if made.segments:
            _prefill(builder, Request(made))
            return


def _common(builder: CudaMetadataBuilder, seq_len: int, num_new: int) -> CommonAttentionMetadata:
    """vLLM's metadata of a single row in the null block."""
    device = builder.device
    width = table_width(builder.vllm_config.model_config.max_model_len, builder.block_size)
    starts, lens = (
        torch.from_numpy(np.array(part, np.int32)) for part in ([0, num_new], [seq_len])
    )
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(device),
        seq_lens_cpu_upper_bound=lens,
        num_reqs=1,
        num_actual_tokens=num_new,
        max_query_len=num_new,
        max_seq_len=seq_len,
        block_table_tensor=torch.zeros(1, width, dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(num_new, dtype=torch.int64, device=device),
    )
