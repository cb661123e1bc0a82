"""FlashAttention 3's own operator, which takes the sequences of a call in any order.

Each reads and writes where `cu_seqlens_q` says, if `seqused_q` says how many queries it has. vLLM's
function passes no such lengths, so what it is asked goes to the operator below it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backends import flash_attn

logger = init_logger("vllm.kvselect")  # below "vllm", so that vLLM's logging settings apply

LENGTHS = (40, 700, 1, 0, 333, 512)
"""Entries of the sequences of a trial."""

_NOT_USED = dict.fromkeys(
    (
        "k_new",
        "v_new",
        "q_v",
        "cu_seqlens_k",
        "cu_seqlens_k_new",
        "kv_batch_idx",
        "leftpad_k",
        "rotary_cos",
        "rotary_sin",
        "seqlens_rotary",
        "pack_gqa",
        "cp_tot_seqused_k",
    )
)
_CONSTANT = {
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "is_rotary_interleaved": True,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
_RENAMED = {"block_table": "page_table", "causal": "is_causal"}
"""What vLLM's function calls otherwise; `fa_version` it keeps to itself."""


def attend(given: Mapping[str, Any], sequences: torch.Tensor, num_queries: torch.Tensor) -> None:
    """Attention of one query a sequence.

    Args:
        given: What vLLM's function is given, rows of the table and lengths in order of `sequences`.
        sequences: The sequence of each row, `[n + 1]` int32: which queries it has, and outputs.
        num_queries: Ones, `[n]` int32.
    """
    own = {_RENAMED.get(name, name): part for name, part in given.items() if name != "fa_version"}
    own |= {"cu_seqlens_q": sequences, "seqused_q": num_queries}
    torch.ops._vllm_fa3_C.fwd(**{"scheduler_metadata": None, **_NOT_USED, **_CONSTANT, **own})


def takes_any_order(
    group: int,
    head_size: int,
    page_size: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    constants: Mapping[str, Any],
) -> bool:
    """Whether the operator gives, bit for bit, what vLLM's function gives in order.

    Args:
        group: Query heads of a sequence.
        head_size: Elements of a query.
        page_size: Entries of a page.
        dtypes: Of queries and of what is written.
        device: Where they are.
        constants: What else vLLM's function is given for `len(LENGTHS)` sequences.
    """
    if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
        return False
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtypes[0])

    width = -(-max(LENGTHS) // page_size)
    pages = torch.randperm(len(LENGTHS) * width, generator=generator).int().view(-1, width)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    starts = torch.arange(len(LENGTHS) + 1, dtype=torch.int32)
    order = lengths.argsort(descending=True)
    sequences = torch.cat((order.int(), starts[-1:]))
    query = drawn(len(LENGTHS), group, head_size)
    outputs = torch.full((2, *query.shape), torch.nan, dtype=dtypes[1], device=device)
    given = {
        "q": query,
        "k": drawn(pages.numel(), page_size, 1, head_size),
        "v": drawn(pages.numel(), page_size, 1, head_size),
        "max_seqlen_q": 1,
        "max_seqlen_k": max(LENGTHS),
        "num_splits": 0,
        "s_aux": None,
        **constants,
    }
    in_order = {"out": outputs[0], "seqused_k": lengths, "block_table": pages}
    sorted_ones = {"out": outputs[1], "seqused_k": lengths[order], "block_table": pages[order]}
    first, second = (
        {**given, **{name: part.to(device) for name, part in own.items()}}
        for own in (in_order, sorted_ones)
    )
    flash_attn.flash_attn_varlen_func(**first, cu_seqlens_q=starts.to(device))
    try:
        attend(second, sequences.to(device), torch.ones_like(lengths).to(device))
    except RuntimeError as error:  # another release's operator
        logger.warning("KV eviction reads heads in the order of the batch: %s", error)
        return False
    return torch.equal(*outputs)
