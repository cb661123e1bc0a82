"""Each part of selection alone, against the floor that this machine sets.

Random tensors in the shape of one layer of the small model (9 query and 3 KV heads of 64 channels,
hidden size 576), in the type that the processor multiplies fast. One thread, as vLLM's CPU worker
computes; caches are flushed before every call. The floor of a part is the larger of its bytes over
the measured copy bandwidth and its multiplications over the measured matrix rate.
"""

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from _selection import LayerShape, Machine, parts, report

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels import cpu
from vllm_kvselect.kernels.base import REFERENCES
from vllm_kvselect.machine import fast_dtype

SHAPE = LayerShape(kv_heads=3, group=3, head_size=64, hidden_size=576, block_size=32)


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
    kernels = REFERENCES if reference else cpu.load()
    machine = Machine(copy_bandwidth(), matrix_rate())
    print(
        f"one thread: copies {machine.bandwidth / 1e9:.1f} GB/s, "
        f"multiplies {machine.rate / 1e12:.2f} TFLOP/s"
    )
    config = EvictionConfig(method="adakv-perturb", budget=budget)
    timed_parts = (
        (
            length,
            [
                (part, median_time(part.run, rounds))
                for part in parts(SHAPE, length, config, kernels, "cpu")
            ],
            "",
        )
        for length in map(int, lengths.split(","))
    )
    report(machine, timed_parts)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy that no cache holds."""
    source = torch.ones(2**28, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / min(timed(lambda: target.copy_(source)) for _ in range(5))


def matrix_rate() -> float:
    """Operations per second of a large product in the type that this processor multiplies fast."""
    left, right = torch.randn(2, 2048, 2048).to(fast_dtype())
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
