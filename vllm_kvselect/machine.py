"""What this machine's processor multiplies fast: the one place that knows."""

from functools import cache

import torch


@cache
def fast_dtype() -> torch.dtype:
    """Returns the data type in which a model runs fast on this machine's processor.

    A processor without instructions for bfloat16 converts every operand: PyTorch then multiplies
    30 to 60 times slower than in float32. `ATEN_CPU_CAPABILITY`, by which PyTorch is held to older
    instructions, counts too.

    Returns:
        `torch.bfloat16` where the processor has instructions for it, else `torch.float32`.
    """
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    # On x86 these instructions came with AVX-512; elsewhere the operator's answer stands alone.
    capability = torch.backends.cpu.get_cpu_capability()
    is_old_x86 = capability in ("AVX2", "DEFAULT") and torch.cpu.get_capabilities().get("sse2")
    return torch.bfloat16 if supported and not is_old_x86 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a data type's name as vLLM's `--dtype` takes it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
