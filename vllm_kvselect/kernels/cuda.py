"""Twins for CUDA in Triton (`kernels/triton/`), compiled for the device at their first launch.

None of them waits for the device. They take float32 scores and bfloat16, float16 or float32 keys
and values; other dtypes go to the reference. Importing this module imports Triton, which comes
with vLLM on CUDA; nothing else does.
"""

from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.kernels.triton.allocation import adaptive_pages, shared_pages
from vllm_kvselect.kernels.triton.compaction import (
    gather_entries,
    gather_from_blocks,
    scatter_entries,
)
from vllm_kvselect.kernels.triton.criticality import criticality, extremes
from vllm_kvselect.kernels.triton.page_table import headwise_page_table
from vllm_kvselect.kernels.triton.probe import probed_scores
from vllm_kvselect.kernels.triton.pruning import select_pruned
from vllm_kvselect.kernels.triton.selection import select, stage_1_mask
from vllm_kvselect.kernels.triton.value_norms import projected_value_norms
from vllm_kvselect.kernels.triton.window_attention import mean_attention, snapkv_scores

KERNELS = Kernels(
    snapkv_scores=snapkv_scores,
    mean_attention=mean_attention,
    probed_scores=probed_scores,
    projected_value_norms=projected_value_norms,
    select_pruned=select_pruned,
    adaptive_pages=adaptive_pages,
    shared_pages=shared_pages,
    stage_1_mask=stage_1_mask,
    select=select,
    gather_entries=gather_entries,
    gather_from_blocks=gather_from_blocks,
    scatter_entries=scatter_entries,
    headwise_page_table=headwise_page_table,
    extremes=extremes,
    criticality=criticality,
)
