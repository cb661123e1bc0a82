"""What this machine computes with, and in which data type fast. The one place that knows."""

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

from vllm_kvselect import __version__


@cache
def fast_dtype() -> torch.dtype:
    """Returns the data type in which a model runs fast on this machine's processor.

    A processor without instructions for bfloat16 converts every operand: PyTorch then multiplies
    30 to 60 times slower than in float32 on AVX2. On AVX-512 without them oneDNN imitates them,
    which is slower than float32 too. `ATEN_CPU_CAPABILITY`, by which PyTorch is held to older
    instructions, counts.

    Returns:
        `torch.bfloat16` where the processor has instructions for it, else `torch.float32`.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return torch.float32
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    # On x86 it is said to be supported wherever it can be imitated; elsewhere the answer stands.
    capabilities = torch.cpu.get_capabilities()
    if capabilities["architecture"] == "x86_64":
        has_instructions = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
        is_held_back = torch.backends.cpu.get_cpu_capability() != "AVX512"
        supported = supported and bool(has_instructions) and not is_held_back
    return torch.bfloat16 if supported else torch.float32


def default_device() -> torch.device:
    """Returns what models run on outside the engine: the first GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype() -> str:
    """Returns what `--dtype` is by default: the weights' own ("auto") on a GPU, else a fast one."""
    return "auto" if torch.cuda.is_available() else dtype_name(fast_dtype())


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a data type's name as vLLM's `--dtype` takes it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def processor() -> str:
    """Returns the processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Returns what a measurement says of where it ran: processor, cores, Python and the plugin."""
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "plugin": __version__,
    }
