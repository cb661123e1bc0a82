"""Each part of selection alone, against the floor that this machine sets.

Random tensors in the shape of one layer of the small model (9 query and 3 KV heads of 64 channels,
hidden size 576, bfloat16), one thread, as vLLM's CPU worker computes; caches are flushed before
every call. The floor of a part is the larger of its bytes over the measured copy bandwidth and its
multiplications over the measured matrix rate.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

from vllm_kvselect.compaction import gather_entries
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels import cpu
from vllm_kvselect.methods import METHODS, NO_TWINS, Twins
from vllm_kvselect.pruning import needed_value_norms, select_pruned
from vllm_kvselect.scoring.value_norms import OutputProjection
from vllm_kvselect.selection import stage_1_mask

KV_HEADS, GROUP, HEAD_SIZE, HIDDEN_SIZE, BLOCK_SIZE = 3, 3, 64, 576, 32
BF16 = 2


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


def main(
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths.")
    ] = "1024,2048,4096,8192,16384,32768,65536,131072",
    budget: Annotated[float, typer.Option(help="Fraction of the prompt.")] = 0.2,
    rounds: Annotated[int, typer.Option(min=1, help="Calls of each part; the median.")] = 15,
    reference: Annotated[
        bool, typer.Option("--reference", help="The references instead of the kernels.")
    ] = False,
) -> None:
    """Times every part at every length and prints how far it is from its floor."""
    torch.set_num_threads(1)
    twins = NO_TWINS if reference else cpu.load()
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    print(f"one thread: copies {bandwidth / 1e9:.1f} GB/s, multiplies {rate / 1e12:.2f} TFLOP/s")
    table = Table("tokens", "part", "ms", "floor ms", "of the floor")
    results = []
    for length in map(int, lengths.split(",")):
        total = 0.0
        for part in parts(length, EvictionConfig(budget=budget), twins):
            seconds = median_time(part.run, rounds)
            floor = max(part.num_bytes / bandwidth, part.num_flops / rate)
            total += seconds
            table.add_row(
                str(length),
                part.name,
                f"{seconds * 1e3:.3f}",
                f"{floor * 1e3:.3f}",
                f"{seconds / floor:.1f}x",
            )
            results.append([length, part.name, seconds, floor])
        table.add_row(
            str(length), "[bold]together", f"[bold]{total * 1e3:.3f}", "", "", end_section=True
        )
    Console().print(table)
    print(json.dumps({"bandwidth": bandwidth, "rate": rate, "parts": results}))


def parts(length: int, config: EvictionConfig, twins: Twins) -> list[Part]:
    """The parts of one layer's selection for a prompt, each with its inputs ready."""

    def fast(reference: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return twins.get(reference, reference)

    method = METHODS[config.method]
    query, key, value, projection = layer(length, config.window, bool(twins))
    scale = HEAD_SIZE**-0.5
    num_packed = max(1, round(config.budget * length) // BLOCK_SIZE - 1)
    num_retained = num_packed * KV_HEADS * BLOCK_SIZE
    num_tokens = (length - config.window) // BLOCK_SIZE * BLOCK_SIZE
    value = value[:, :num_tokens]
    scores = fast(method.scorer)(query, key, scale, config)[:, :num_tokens]
    pages = fast(method.allocator)(scores, num_packed, BLOCK_SIZE, config)
    budgets = pages * BLOCK_SIZE
    options = (budgets, num_retained, config.alpha, config.eps)
    retained = fast(select_pruned)(scores, scores, value, projection, *options)
    # The reference's norms: the kernel needs somewhat fewer.
    stage_1 = stage_1_mask(scores, budgets, config.alpha)
    norms = needed_value_norms(scores, value, projection, stage_1, budgets, config.eps)
    num_norms = int((norms > 0).sum())
    entry, row = HEAD_SIZE * BF16, 4 * scores.numel()
    products = 2 * HEAD_SIZE * KV_HEADS * GROUP
    return [
        Part(
            "window attention, pooled",
            lambda: fast(method.scorer)(query, key, scale, config),
            KV_HEADS * length * entry + row,
            products * config.window * length,
        ),
        Part(
            "allocation",
            lambda: fast(method.allocator)(scores, num_packed, BLOCK_SIZE, config),
            row,
            0,
        ),
        Part(
            f"two stages, {num_norms / scores.numel():.0%} of the norms",
            lambda: fast(select_pruned)(scores, scores, value, projection, *options),
            (value.numel() + projection.weight.numel()) * BF16 + row + 8 * num_retained,
            # The bounds of all, the projection of those needed.
            2 * value.numel() * HEAD_SIZE + 2 * num_norms * HEAD_SIZE * GROUP * HIDDEN_SIZE,
        ),
        Part(
            "gathering",
            lambda: [fast(gather_entries)(part, retained, num_tokens) for part in (key, value)],
            4 * num_retained * entry,
            0,
        ),
    ]


def layer(
    length: int, window: int, packed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, OutputProjection]:
    """Queries of the window, keys and values as the fused projection leaves them, and W_O."""
    torch.manual_seed(0)
    heads = KV_HEADS * (GROUP + 2)
    fused = torch.randn(length, heads, HEAD_SIZE)
    # Values differ in strength, as real ones do.
    fused *= torch.rand(length, heads, 1) ** 2
    query, key, value = fused.bfloat16().split((KV_HEADS * GROUP, KV_HEADS, KV_HEADS), dim=1)
    weight = (torch.randn(KV_HEADS, HEAD_SIZE, GROUP, HIDDEN_SIZE) / 24).bfloat16()
    projection = OutputProjection.of(weight)
    if packed:
        projection = cpu.pack(projection)
    return query[-window:], key.transpose(0, 1), value.transpose(0, 1), projection


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy that no cache holds."""
    source = torch.ones(2**28, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / min(timed(lambda: target.copy_(source)) for _ in range(5))


def matrix_rate() -> float:
    """Operations per second of a large product in bfloat16."""
    left, right = torch.randn(2, 2048, 2048).bfloat16()
    return 2 * 2048**3 / min(timed(lambda: left @ right) for _ in range(5))


def median_time(run: Callable[[], object], rounds: int) -> float:
    """Median time of a call with cold caches."""
    flush, times = torch.empty(2**22), []
    for _ in range(rounds):
        flush.add_(1)
        times.append(timed(run))
    return statistics.median(times)


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    typer.run(main)
