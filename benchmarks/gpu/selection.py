"""Each part of selection alone on a GPU, against its floor, and as a share of a layer's prefill.

Random tensors in the shape of one layer of an 8B Llama, bfloat16, and the Triton kernels. Events
time the device; the L2 cache is flushed before every call. The floor of a part is the larger of its
bytes over the measured copy bandwidth and its multiplications over the measured matrix rate. The
prefill is that of one layer at the measured matrix rate; in truth it takes longer.
"""

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from _device import DEVICE, HAS_CARD, row
from _selection import LayerShape, Machine, Part, parts, report
from _timing import copy_bandwidth, matrix_rate, median_time

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels.base import REFERENCES

SHAPE = LayerShape(kv_heads=8, group=4, head_size=128, hidden_size=4096, block_size=16)
INTERMEDIATE_SIZE = 14336


def main(
    lengths: Annotated[str, typer.Option(help="Prompt lengths.")] = "8192,16384,32768,65536,131072",
    budget: Annotated[float, typer.Option(help="Fraction of the prompt.")] = 0.125,
    rounds: Annotated[int, typer.Option(min=1, help="Calls of each part; the median.")] = 15,
    reference: Annotated[
        bool, typer.Option("--reference", help="The references, which wait for the device.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Short, by the references.")] = False,
) -> None:
    """Times every part at every length and prints how far it is from its floor."""
    if dry_run:
        lengths, rounds, reference = "256", 1, True
    elif not torch.cuda.is_available():
        raise typer.BadParameter("there is no GPU; benchmarks/selection.py times the CPU's kernels")
    kernels = REFERENCES
    if not reference:
        from vllm_kvselect.kernels import cuda

        kernels = cuda.KERNELS
    machine = Machine(copy_bandwidth(), matrix_rate())
    print(
        f"{torch.cuda.get_device_name() if HAS_CARD else 'CPU'}: "
        f"copies {machine.bandwidth / 1e12:.2f} TB/s, "
        f"multiplies {machine.rate / 1e12:.0f} TFLOP/s"
    )
    config = EvictionConfig(method="adakv-perturb", budget=budget)

    def timed_parts(length: int) -> tuple[int, list[tuple[Part, float]], str]:
        timed = [
            (part, median_time(part.run, rounds, guarded=not reference))
            for part in parts(SHAPE, length, config, kernels, DEVICE)
        ]
        prefill = layer_flops(length) / machine.rate
        share = sum(seconds for _, seconds in timed) / prefill
        row(f"selection, {length} tokens", f"{share:.1%} of the prefill")
        return length, timed, f"{share:.1%} of prefill"

    report(machine, (timed_parts(length) for length in map(int, lengths.split(","))))


def layer_flops(length: int) -> int:
    """Operations of a layer's prefill: its weights once a token, and causal attention."""
    query_size = SHAPE.kv_heads * SHAPE.group * SHAPE.head_size
    attention_weights = 2 * query_size + 2 * SHAPE.kv_heads * SHAPE.head_size
    weights = SHAPE.hidden_size * (attention_weights + 3 * INTERMEDIATE_SIZE)
    return 2 * weights * length + 2 * length**2 * query_size


if __name__ == "__main__":
    typer.run(main)
