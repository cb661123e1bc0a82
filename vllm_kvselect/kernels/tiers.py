"""Tiers of the CPU kernels: in which type this machine multiplies tiles of a model's type."""

from functools import cache

import torch

from vllm_kvselect.machine import dtype_name, fast_dtype

STORED = (torch.bfloat16, torch.float16, torch.float32)
"""Types of keys, values and weights that the kernels take."""


def multiplied_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which the kernels multiply one of `STORED` on this machine.

    Returns:
        `dtype` itself, or float32: rows of a tile are then widened before they are multiplied.
    """
    if dtype == torch.bfloat16 and _multiplies_bfloat16():
        return torch.bfloat16
    return torch.float32


def describe(dtype: torch.dtype) -> str:
    """Says which tier a model runs in: "bfloat16, AMX" or "bfloat16 widened to float32, AVX2"."""
    name, multiplied = dtype_name(dtype), multiplied_dtype(dtype)
    if multiplied == torch.bfloat16:
        has_amx = torch.cpu.get_capabilities().get("amx_bf16")
        return f"{name}, {'AMX' if has_amx else 'AVX512_BF16'}"
    instructions = torch.backends.cpu.get_cpu_capability()
    return f"{name}{'' if multiplied == dtype else ' widened to float32'}, {instructions}"


@cache
def _multiplies_bfloat16() -> bool:
    """Multiplies one tile where bfloat16 is fast: oneDNN may be held back (ONEDNN_MAX_CPU_ISA)."""
    if fast_dtype() != torch.bfloat16:
        return False
    key, query = torch.zeros(1, 2, 16).bfloat16(), torch.zeros(1, 1, 16).bfloat16()
    try:
        given = (query, key, 1.0, 1, None, None)
        torch.ops.vllm_kvselect.window_attention(*given, torch.bfloat16, False)
    except RuntimeError:
        return False
    return True
