"""Twins for CUDA in Triton (`kernels/triton/`), compiled for the device at their first launch.

None of them waits for the device. They take float32 scores and bfloat16, float16 or float32 keys
and values; other dtypes go to the reference. Importing this module imports Triton, which comes
with vLLM on CUDA; nothing else does.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_kvselect import allocation, compaction, page_table, pruning, selection
from vllm_kvselect.kernels.triton.allocation import adaptive_pages, shared_pages
from vllm_kvselect.kernels.triton.compaction import (
    gather_entries,
    gather_from_blocks,
    scatter_entries,
)
from vllm_kvselect.kernels.triton.page_table import headwise_page_table
from vllm_kvselect.kernels.triton.pruning import needed_value_norms, select_pruned
from vllm_kvselect.kernels.triton.selection import select, stage_1_mask
from vllm_kvselect.kernels.triton.value_norms import projected_value_norms
from vllm_kvselect.kernels.triton.window_attention import snapkv_scores
from vllm_kvselect.scoring import snapkv
from vllm_kvselect.scoring import value_norms as norms

TWINS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    snapkv.snapkv_scores: snapkv_scores,
    norms.projected_value_norms: projected_value_norms,
    pruning.needed_value_norms: needed_value_norms,
    pruning.select_pruned: select_pruned,
    allocation.adaptive_pages: adaptive_pages,
    allocation.shared_pages: shared_pages,
    selection.stage_1_mask: stage_1_mask,
    selection.select: select,
    compaction.gather_entries: gather_entries,
    compaction.gather_from_blocks: gather_from_blocks,
    compaction.scatter_entries: scatter_entries,
    page_table.headwise_page_table: headwise_page_table,
}
"""Fast twins of the references, one module a device: same names, same signatures."""
