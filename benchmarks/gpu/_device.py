"""The device that is measured, or a stand-in for it, with which a dry run walks every step."""

import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch

# Asked through the driver's library, as vLLM does: else the processes that vLLM forks have no CUDA.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_CARD = DEVICE == "cuda"


def row(what: str, result: str) -> None:
    """Prints a row of the report the moment it is known."""
    print(json.dumps({"what": what, "result": result}), flush=True)


def attention_call(backend: str) -> Callable[..., Any]:
    """A backend's call as vLLM makes it, for one query a sequence; the stand-in without a card."""
    if not HAS_CARD:
        return paged_attention
    if backend == "TRITON_ATTN":
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        def triton(**given: Any) -> Any:
            unset = {"window_size": (-1, -1), "softcap": 0.0, "q_descale": None}
            scales = {"k_descale": None, "v_descale": None}
            return unified_attention(**given, **unset, **scales)

        return triton
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    def flash(**given: Any) -> Any:
        version = get_flash_attn_version(head_size=given["q"].shape[-1])
        return flash_attn_varlen_func(**given, fa_version=version)

    return flash


def paged_attention(**given: Any) -> None:
    """Attention of one query a sequence over pages, in plain PyTorch."""
    pages, lengths = given["block_table"], given["seqused_k"].tolist()
    key, value = given["k"], given["v"]
    for index, length in enumerate(lengths):
        used = pages[index, : -(-length // key.shape[1])].long()
        keys, values = (part[used].flatten(0, 1)[:length].float() for part in (key, value))
        query = given["q"][index].float().unflatten(0, (keys.shape[1], -1))
        logits = torch.einsum("hgd,thd->hgt", query, keys) * given["softmax_scale"]
        attended = torch.einsum("hgt,thd->hgd", logits.softmax(-1), values)
        given["out"][index] = attended.flatten(0, 1).to(given["out"].dtype)


def host_time(
    run: Callable[[], object], rounds: int, prepare: Callable[[], object] = lambda: None
) -> float:
    """Median seconds of a call on the processor, while a device has nothing to do.

    Args:
        run: The call.
        rounds: How often it is timed.
        prepare: What comes before each call, and is not timed.
    """
    times = []
    for _ in range(rounds):
        prepare()
        if HAS_CARD:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
