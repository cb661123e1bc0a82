"""Schedules: work plans of vLLM's CPU kernel, made anew only when sequences reach another tile."""

import torch
from vllm import _custom_ops as ops
from vllm import envs

from vllm_kvselect.engine.view.sequences import Call, HeadwiseBatch, OneHeadBatch

TILE = 16
"""Tokens of the smallest tile of any instruction set; other tiles are twice as large."""


class Schedules:
    """Work plans for the layers of a group, whose heads have lengths of their own.

    A plan shares out whole tiles among threads; within one the kernel stops at a token's own
    position. So a plan for lengths up to the ends of their tiles holds until one is full. All
    sequences of a row fill theirs in the same step, since their pages are whole tiles.
    """

    def __init__(self, isa: str, cache_dtype: str = "auto") -> None:
        self._isa, self._cache_dtype = isa, cache_dtype
        self._batch: HeadwiseBatch | None = None
        self._pages: torch.Tensor | None = None
        self._tile_ends = torch.empty(0)
        self._kept: dict[tuple[object, ...], torch.Tensor] = {}

    def of(
        self, layer_index: int, batch: OneHeadBatch, call: Call, query: torch.Tensor
    ) -> torch.Tensor:
        """The plan of a call, which the kernel takes as `scheduler_metadata`.

        Args:
            layer_index: The layer's place in the group.
            batch: The step's batch.
            call: A call of it in that layer.
            query: The call's queries, `[num_queries, group, head_size]`.
        """
        seq_lens = call.table.seq_lens
        # Without page tables of all layers the next step has nothing to take over.
        if not isinstance(batch, HeadwiseBatch) or batch.table is None or batch.max_query_len > 1:
            return self._make(seq_lens, call.query_start_loc, query)
        if batch is not self._batch:
            self._drop_outdated(batch)
        key = (layer_index, *call.pairs[1:])
        if key not in self._kept:
            self._kept[key] = self._make(_tile_ends(seq_lens), call.query_start_loc, query)
        return self._kept[key]

    def _drop_outdated(self, batch: HeadwiseBatch) -> None:
        """Looks at a new step: whether its sequences have the pages and the tiles of the last."""
        assert batch.table is not None
        pages = batch.table.pages
        tile_ends = _tile_ends(batch.rows.seq_lens)
        if pages is not self._pages or not torch.equal(tile_ends, self._tile_ends):
            self._kept.clear()
        self._batch, self._pages, self._tile_ends = batch, pages, tile_ends

    def _make(
        self, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, query: torch.Tensor
    ) -> torch.Tensor:
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=seq_lens.numel(),
            num_heads=query.shape[1],
            num_kv_heads=1,
            head_dim=query.shape[2],
            seq_lens=seq_lens,
            dtype=query.dtype,
            query_start_loc=query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=self._isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=self._cache_dtype,
        )


def _tile_ends(seq_lens: torch.Tensor) -> torch.Tensor:
    """Lengths up to the ends of their tiles."""
    return -(-seq_lens // TILE) * TILE
