"""xformers' `triton_splitk` over pages of single heads: a second provider of the decode call.

It needs the extra `xformers`. What it cannot take is refused at start-up by `problems`.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_kvselect.engine.refusal import sentences
from vllm_kvselect.paging.page_table import PageTable

_HEAD_SIZES = (16, 32, 64, 128, 256, 512)
_TILE = 64
"""Keys that a program of the kernel takes at once, and no more than a page has."""


def problems(vllm_config: VllmConfig) -> list[str]:
    """What stands against taking xformers for the decode call: a sentence each, with what to do."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    head_size = model.get_head_size()
    reasons = {
        "is not installed: pip install '.[xformers]' in a checkout": _release("xformers") is None,
        "0.0.35 was written for a Triton before 3.9: pip install 'triton<3.9'": (
            (_release("triton") or (0, 0)) >= (3, 9)
        ),
        # A graph's padding has no entries, and the kernel divides by their number.
        "cannot be in a graph of a whole step: add -cc.cudagraph_mode=PIECEWISE": (
            vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        ),
        f"does not take heads of {head_size} channels": head_size not in _HEAD_SIZES,
        f"does not take {model.dtype}: add --dtype bfloat16": (
            model.dtype not in (torch.bfloat16, torch.float16)
        ),
        "has its own fp8 format: leave --kv-cache-dtype out": cache.cache_dtype.startswith("fp8"),
    }
    return sentences("xformers {}, or leave decode_attention out", reasons)


def _release(distribution: str) -> tuple[int, ...] | None:
    """The first two numbers of an installed distribution's version."""
    try:
        return tuple(int(part) for part in version(distribution).split(".")[:2])
    except PackageNotFoundError:
        return None


class SplitKAttention:
    """The decode call for rows with one query each.

    Args:
        key_pages: Keys of all layers, `[num_pages, block_size, 1, head_size]`.
        value_pages: Values, likewise.
        scale: Factor of the logits.
    """

    def __init__(self, key_pages: torch.Tensor, value_pages: torch.Tensor, scale: float) -> None:
        from xformers.ops.fmha import attn_bias, common, triton_splitk

        self._bias, self._inputs, self._scale = attn_bias, common.Inputs, scale
        self._block_size = key_pages.shape[1]
        # [1, num_slots, 1, head_size]
        self._key, self._value = (pages.flatten(0, 1)[None] for pages in (key_pages, value_pages))
        # The largest power of two that divides a page.
        tile = min(_TILE, self._block_size & -self._block_size)
        self._operator: Any = type("SplitK", (triton_splitk.FwOp,), {"BLOCK_N": tile})

    def __call__(
        self, query: torch.Tensor, table: PageTable, max_seq_len: int, output: torch.Tensor
    ) -> None:
        """Attends; nothing waits for the device.

        Args:
            query: `[num_sequences, group, head_size]`, one query a sequence.
            table: Pages and lengths of the sequences, `[num_sequences, width]` and
                `[num_sequences]` int32.
            max_seq_len: A bound on the lengths.
            output: Written in place, shaped as `query`.
        """
        num_sequences, group, _ = query.shape
        # What is only looked at on the host, by checks that are not called here.
        starts, lengths = range(num_sequences + 1), range(num_sequences)
        no_starts = table.seq_lens.new_empty(0)
        bias = self._bias.PagedBlockDiagonalPaddedKeysMask(
            q_seqinfo=self._bias._SeqLenInfo(no_starts, 1, 1, starts),
            k_seqinfo=self._bias._PaddedSeqLenInfo(
                no_starts, max_seq_len, 1, starts, table.seq_lens, lengths, max_seq_len
            ),
            # The kernel plans its parts for as many pages as there are.
            block_tables=table.pages[:, : -(-max_seq_len // self._block_size)],
            page_size=self._block_size,
        )
        key, value = (part.expand(-1, -1, group, -1) for part in (self._key, self._value))
        inputs = self._inputs(query[None], key, value, bias, scale=self._scale)
        attended, _ = self._operator.apply(inputs, needs_gradient=False)
        output.copy_(attended.view_as(output))
