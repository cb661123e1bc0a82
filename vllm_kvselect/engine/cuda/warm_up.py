"""Launches the kernels of eviction once, before anyone waits for them.

Triton compiles a kernel when it is first launched, and while a graph is captured it cannot. What it
compiles for depends on sizes, so prompts of several lengths are packed, and rounds are made: all of
their blocks are the null block, which nobody reads.
"""

from collections.abc import Iterable
from itertools import count, takewhile

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.cuda.builder import CudaMetadataBuilder
from vllm_kvselect.engine.step.received import Received
from vllm_kvselect.engine.step.request import Request
from vllm_kvselect.engine.step.seen_queries import SeenQueries, SeenQuery
from vllm_kvselect.methods.registry import METHODS
from vllm_kvselect.retention import Cuts, cuts

_LONGEST = 16384
"""From this length on the kernels' tiles and splits stay the same."""


def warm_up(
    builder: CudaMetadataBuilder,
    methods: Iterable[str],
    eviction: EvictionConfig,
) -> None:
    """Packs made-up prompts in all layers of a group, makes rounds, and builds page tables.

    Args:
        builder: The group's builder, started.
        methods: Methods that requests may run with.
        eviction: The server's configuration.
    """
    for method in methods:
        config = eviction.model_copy(update={"method": method})
        for num_tokens in _lengths(builder, config):
            request = Request.planned(num_tokens, builder.block_size, config)
            _pack(builder, request, num_tokens)
            if not METHODS[method].whole_prompt:
                _pack(builder, request, config.window)  # reads the rest from the cache
        if eviction.may_make_rounds and METHODS[method].in_rounds:
            _make_rounds(builder, config)
    nothing = Request(0, eviction, Cuts(), None)
    rows = builder.tables.decode_batch([nothing], _common(builder, 1, 1), 0).rows
    for index in range(len(builder.layers)):
        builder.tables.of_layer(index, rows)
    builder.state.clear()


def _lengths(builder: CudaMetadataBuilder, config: EvictionConfig) -> list[int]:
    """The shortest aligned prompt that drops entries, one that is not aligned, and longer ones."""
    block_size, limit = builder.block_size, builder.vllm_config.model_config.max_model_len
    aligned = takewhile(lambda length: length < limit, count(block_size, block_size))
    first = next((length for length in aligned if cuts(length, block_size, config)), None)
    if first is None:
        return []
    doubled = takewhile(
        lambda length: length <= min(limit, _LONGEST), (first << power for power in count(1))
    )
    return [first, first + 1, *doubled]


def _pack(builder: CudaMetadataBuilder, request: Request, num_new: int) -> None:
    """Packs a prompt whose last `num_new` tokens are computed in this step."""
    request.begin_again()
    common = _common(builder, request.num_prompt_tokens, num_new)
    split = builder.splitter(lambda _: [request]).split(common)
    assert split is not None
    dtype = builder.vllm_config.model_config.dtype
    for layer in builder.layers:
        query, key = (
            torch.zeros(num_new, heads, layer.head_size, dtype=dtype, device=builder.device)
            for heads in (layer.num_heads, layer.num_kv_heads)
        )
        for observation in split.observations:
            layer.impl.observe(query, key, key, observation)
        for completion in split.completions:
            layer.impl.pack(query, key, key, completion)


def _make_rounds(builder: CudaMetadataBuilder, config: EvictionConfig) -> None:
    """Makes the first two rounds of a request: before the second one its heads are uneven."""
    builder.state.clear()  # a request that has dropped nothing has no offsets
    if not config.decode_budget:  # requests choose theirs
        config = config.model_copy(update={"decode_budget": config.window + builder.block_size})
    longest = builder.vllm_config.model_config.max_model_len - 1
    request = Request.planned(1, builder.block_size, config, longest)
    seen = SeenQueries(slice(None), len(builder.layers))
    for index, layer in enumerate(builder.layers):
        shape = (1, layer.num_heads, layer.head_size)
        dtype = builder.vllm_config.model_config.dtype
        seen.see(index, torch.zeros(shape, dtype=dtype, device=builder.device))
    for cut in request.cuts[:2]:
        if request.has_sums and request.received is None:
            shape = (len(builder.layers), builder.state.num_kv_heads, 1)
            request.received = Received.of_prompt(torch.zeros(shape, device=builder.device))
        request.seen = {
            position: SeenQuery(seen, 0)
            for position in range(request.first_seen(cut), cut.position)
        }
        request.num_computed = cut.position
        builder.splitter(lambda _: [request]).split(_common(builder, cut.position + 1, 1))


def _common(builder: CudaMetadataBuilder, seq_len: int, num_new: int) -> CommonAttentionMetadata:
    """vLLM's metadata of a single row in the null block."""
    device = builder.device
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
        block_table_tensor=torch.zeros(
            1, -(-seq_len // builder.block_size), dtype=torch.int32, device=device
        ),
        slot_mapping=torch.zeros(num_new, dtype=torch.int64, device=device),
    )
