"""Twins for CUDA in Triton (`kernels/triton/`), compiled for the device at their first launch.

None of them waits for the device. They take float32 scores and bfloat16, float16 or float32 keys
and values; other dtypes go to the reference. Importing this module imports Triton, which comes
with vLLM on CUDA; nothing else does.
"""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels import rows
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.kernels.triton.allocation import share_out
from vllm_kvselect.kernels.triton.compaction import move_retained
from vllm_kvselect.kernels.triton.criticality import criticality, extremes
from vllm_kvselect.kernels.triton.keydiff import keydiff_scores
from vllm_kvselect.kernels.triton.longest_first import longest_first
from vllm_kvselect.kernels.triton.page_table import headwise_page_table
from vllm_kvselect.kernels.triton.paged import takes
from vllm_kvselect.kernels.triton.probe import probe_scores
from vllm_kvselect.kernels.triton.pruning import select_pruned
from vllm_kvselect.kernels.triton.selection import best_first, best_mask, select
from vllm_kvselect.kernels.triton.value_norms import projected_value_norms
from vllm_kvselect.kernels.triton.window_attention import (
    defensive_scores,
    mean_attention,
    snapkv_scores,
)
from vllm_kvselect.scorers import Pooling
from vllm_kvselect.scoring import defensivekv, keydiff, probe, snapkv
from vllm_kvselect.scoring.held import Held
from vllm_kvselect.scoring.inputs import Scorer
from vllm_kvselect.selecting.allocation import adaptive_pages, shared_pages


def _over_rows(
    twin: Callable[[Held, EvictionConfig], torch.Tensor],
    reference: Scorer,
    serves: Callable[[EvictionConfig], bool] = lambda _: True,
) -> Callable[[Held, EvictionConfig], torch.Tensor]:
    """The twin of a scorer where it can be used, else the reference, row by row."""

    def call(held: Held, config: EvictionConfig) -> torch.Tensor:
        if takes(held) and serves(config):
            return twin(held, config)
        return rows.scores(REFERENCES, reference, held, config)

    call.__name__ = reference.__name__
    return call


def _of_values(
    twin: Callable[..., torch.Tensor], lifted: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """The same of what reads values."""

    def call(held: Held, *given: Any) -> torch.Tensor:
        return twin(held, *given) if takes(held) else lifted(REFERENCES, held, *given)

    call.__name__ = twin.__name__
    return call


_OVER_ROWS = (
    _over_rows(snapkv_scores, snapkv.snapkv_scores),
    _over_rows(mean_attention, defensivekv.mean_attention),
    _over_rows(
        defensive_scores,
        defensivekv.defensive_scores,
        # Otherwise rows are pooled one by one.
        lambda config: config.of(Pooling).pooling == "max",
    ),
    _over_rows(probe_scores, probe.probe_scores),
    _over_rows(keydiff_scores, keydiff.keydiff_scores),
    _of_values(projected_value_norms, rows.value_norms),
    _of_values(select_pruned, rows.select_pruned),
)

KERNELS = Kernels(
    adaptive_pages=partial(adaptive_pages, best_first=best_first, share_out=share_out),
    shared_pages=partial(shared_pages, share_out=share_out),
    best_first=best_first,
    best_mask=best_mask,
    select=select,
    move_retained=move_retained,
    headwise_page_table=headwise_page_table,
    longest_first=longest_first,
    extremes=extremes,
    criticality=criticality,
    over_rows=MappingProxyType({twin.__name__: twin for twin in _OVER_ROWS}),
)
