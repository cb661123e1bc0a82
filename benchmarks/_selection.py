"""The parts of one layer's selection, ready to be timed, and the table of what they take."""

import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels import cpu
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.machine import fast_dtype
from vllm_kvselect.paging.compaction import head_pages
from vllm_kvselect.registry import METHODS
from vllm_kvselect.scoring.inputs import ScoringInputs, scorer_named
from vllm_kvselect.scoring.value_norms import OutputProjection
from vllm_kvselect.selecting.pruning import needed_value_norms
from vllm_kvselect.selecting.selection import best_mask, stage_1_counts


def dtype_on(device: str) -> torch.dtype:
    """The data type that a device multiplies fast."""
    return fast_dtype() if device == "cpu" else torch.bfloat16


class LayerShape(NamedTuple):
    """Shape of a layer and its cache.

    Attributes:
        kv_heads: KV heads.
        group: Query heads per KV head.
        head_size: Channels per head.
        hidden_size: Channels between layers.
        block_size: Tokens per block.
    """

    kv_heads: int
    group: int
    head_size: int
    hidden_size: int
    block_size: int


class Part(NamedTuple):
    """One part of selection.

    Attributes:
        name: What it computes.
        run: Computes it.
        num_bytes: Bytes it cannot avoid to read or write.
        num_flops: Operations of its matrix products.
    """

    name: str
    run: Callable[[], object]
    num_bytes: int
    num_flops: int


class Machine(NamedTuple):
    """What a machine can do, measured.

    Attributes:
        bandwidth: Bytes read and written per second by a large copy.
        rate: Operations per second of a large product in the type that the device multiplies fast.
    """

    bandwidth: float
    rate: float

    def floor(self, part: Part) -> float:
        """Seconds that a part takes at least."""
        return max(part.num_bytes / self.bandwidth, part.num_flops / self.rate)


def parts(
    shape: LayerShape, length: int, config: EvictionConfig, kernels: Kernels, device: str
) -> list[Part]:
    """The parts of one layer's selection for a prompt, each with its inputs ready."""
    method, block_size = METHODS[config.method], shape.block_size
    inputs = layer(shape, length, config.window, device)
    projection = inputs.output_projection
    assert projection is not None
    prepared = cpu.pack(projection) if kernels is cpu.KERNELS else projection
    num_packed = max(1, round(config.budget * length) // block_size - 1)
    num_retained = num_packed * shape.kv_heads * block_size
    num_tokens = (length - config.window) // block_size * block_size
    key, value = inputs.key, inputs.value[:, :num_tokens]
    scorer = kernels.scorer(scorer_named(method.scores))
    allocate = getattr(kernels, method.allocator)
    scores = scorer(inputs, config)[:, :num_tokens]
    pages = allocate(scores[None], [num_packed], block_size, config)[0]
    budgets = pages * block_size
    of_stage_1 = stage_1_counts(budgets, config.alpha)
    options = (budgets, num_retained, of_stage_1, config.eps)
    retained = kernels.select_pruned(scores, scores, value, prepared, *options)
    # The reference's norms: the CPU kernel needs somewhat fewer.
    stage_1 = best_mask(scores, of_stage_1)
    norms = needed_value_norms(scores, value, projection, stage_1, budgets, config.eps)
    num_norms = int((norms > 0).sum())
    row = 4 * scores.numel()
    products = 2 * shape.head_size * shape.kv_heads * shape.group
    return [
        Part(
            "window attention, pooled",
            lambda: scorer(inputs, config),
            key.nbytes + row,
            products * config.window * length,
        ),
        Part(
            "allocation",
            lambda: allocate(scores[None], [num_packed], block_size, config),
            row,
            0,
        ),
        Part(
            f"two stages, {num_norms / scores.numel():.0%} of the norms",
            lambda: kernels.select_pruned(scores, scores, value, prepared, *options),
            value.nbytes + projection.weight.nbytes + row + 8 * num_retained,
            # The bounds of all, the projection of those needed.
            2 * value.numel() * shape.head_size
            + 2 * num_norms * shape.head_size * shape.group * shape.hidden_size,
        ),
        *(_reads_of_pages(shape, retained, num_tokens, kernels) if device == "cpu" else []),
        *(_moves(shape, retained, num_tokens, kernels) if device != "cpu" else []),
    ]


def _moves(
    shape: LayerShape, retained: torch.Tensor, num_tokens: int, kernels: Kernels
) -> list[Part]:
    """Moves into packed blocks, where keys and values stand side by side."""
    size, width = shape.block_size, 2 * shape.head_size
    blocks = torch.randperm(num_tokens // size, device=retained.device)
    memory = torch.zeros(
        (len(blocks), shape.kv_heads, size, width), dtype=dtype_on("cuda"), device=retained.device
    )
    pages = head_pages(blocks, shape.kv_heads)
    packed = blocks[-(retained.numel() // (shape.kv_heads * size)) :]
    return [
        Part(
            "moving",
            lambda: kernels.move_retained(memory, pages, retained, num_tokens, packed),
            4 * retained.numel() * width * memory.itemsize,
            0,
        )
    ]


def _reads_of_pages(
    shape: LayerShape, retained: torch.Tensor, num_tokens: int, kernels: Kernels
) -> list[Part]:
    """Reads where keys and values are in pages, whose elements stand in fours."""
    width = shape.head_size * dtype_on("cpu").itemsize
    size = shape.block_size * width // 8
    num_pages = shape.kv_heads * num_tokens // shape.block_size
    cache = torch.randint(2**62, (num_pages, 2 * size))
    keys, values = torch.arange(2 * size, dtype=torch.int32).split(size)
    pages = torch.randperm(num_pages)
    slots = pages[retained // shape.block_size] * shape.block_size + retained % shape.block_size
    return [
        Part(
            "reading values",
            lambda: kernels.read_pages(cache, pages, values),
            2 * 8 * num_pages * size,
            0,
        ),
        Part(
            "reading what is retained",
            lambda: [
                kernels.read_entries(cache, slots, p, shape.block_size) for p in (keys, values)
            ],
            4 * retained.numel() * width,
            0,
        ),
    ]


def layer(shape: LayerShape, length: int, window: int, device: str) -> ScoringInputs:
    """Queries of the window, keys and values as the fused projection leaves them, and W_O."""
    dtype = dtype_on(device)
    torch.manual_seed(0)
    heads = shape.kv_heads * (shape.group + 2)
    fused = torch.randn(length, heads, shape.head_size, device=device)
    # Values differ in strength, as real ones do.
    fused *= torch.rand(length, heads, 1, device=device) ** 2
    sizes = (shape.kv_heads * shape.group, shape.kv_heads, shape.kv_heads)
    query, key, value = fused.to(dtype).split(sizes, dim=1)
    weight = torch.randn(
        shape.kv_heads, shape.head_size, shape.group, shape.hidden_size, device=device
    )
    weight = (weight * shape.hidden_size**-0.5).to(dtype)
    tensors = (query[-window:], key.transpose(0, 1), value.transpose(0, 1))
    return ScoringInputs(*tensors, shape.head_size**-0.5, OutputProjection.of(weight))


def report(
    machine: Machine,
    rows: Iterator[tuple[int, list[tuple[Part, float]], str]],
) -> None:
    """Prints a table for people, and one JSON line last.

    Args:
        machine: The machine's rates.
        rows: Length, parts with their seconds, and a remark on their sum.
    """
    table = Table("tokens", "part", "ms", "floor ms", "of the floor")
    results = []
    for length, timed_parts, remark in rows:
        for part, seconds in timed_parts:
            floor = machine.floor(part)
            table.add_row(
                str(length),
                part.name,
                f"{seconds * 1e3:.3f}",
                f"{floor * 1e3:.3f}",
                f"{seconds / floor:.1f}x",
            )
            results.append([length, part.name, seconds, floor])
        total = sum(seconds for _, seconds in timed_parts)
        table.add_row(
            str(length), "[bold]together", f"[bold]{total * 1e3:.3f}", "", remark, end_section=True
        )
    Console().print(table)
    print(json.dumps({**machine._asdict(), "parts": results}))
