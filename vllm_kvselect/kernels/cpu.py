"""Twins for CPU in C++ (`kernels/cpu/`), compiled for this machine when they are first needed.

They take bfloat16, float16 and float32. Which tier runs is found out at run time, for each type
(`tiers.py`):

1. Native tiles: the processor multiplies the model's own type. This is bfloat16 with AMX or
   AVX512_BF16, and float32 everywhere.
2. Float32 tiles: it cannot, so the rows of a tile are widened to float32 and multiplied as such.
   This is float16 everywhere, and bfloat16 on processors without those instructions.
3. References: PyTorch, where nothing can be compiled; other types everywhere.

Sums are float32 in tiers 1 and 2.
"""

import math
from collections.abc import Sequence
from functools import cache, partial, wraps
from typing import cast

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels.base import Function, Kernels
from vllm_kvselect.kernels.build import load_library
from vllm_kvselect.kernels.tiers import STORED, multiplied_dtype
from vllm_kvselect.paging import compaction
from vllm_kvselect.prefilling import criticality as references_of_prefill
from vllm_kvselect.prefilling.criticality import Extremes
from vllm_kvselect.scorers import Pooling, QueryGroup
from vllm_kvselect.scoring import defensivekv, probe, r_kv, snapkv
from vllm_kvselect.scoring import value_norms as references
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.value_norms import OutputProjection
from vllm_kvselect.selecting import allocation, pruning, selection


@cache
def load() -> Kernels:
    """Finds the kernels compiled, or compiles them.

    The first call on a machine takes about 25 s; the result is kept in torch's folder for
    extensions (`TORCH_EXTENSIONS_DIR`).

    Raises:
        KernelError: If they can be neither found nor compiled.
    """
    load_library()
    return KERNELS


def pack(projection: OutputProjection) -> OutputProjection:
    """Packs the weight as the kernels read it, in their order and type; else keeps its shape."""
    weight = projection.weight
    if weight.dtype not in STORED or weight.shape[1] % 2:
        return projection
    packed = _call("pack_weight", weight, multiplied_dtype(weight.dtype))
    return projection._replace(weight=weight.to("meta"), packed=packed)


def snapkv_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Twin of `snapkv.snapkv_scores`, for means over the group and maxima in the pooling."""
    pooling, group_reduction = config.of(Pooling), config.of(QueryGroup).group_reduction
    as_usual = group_reduction == "mean" and pooling.pooling == "max"
    if not as_usual or not _takes(inputs):
        return snapkv.snapkv_scores(inputs, config)
    return _window_attention(inputs, pooling.kernel_size, largest=False)


def mean_attention(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Twin of `defensivekv.mean_attention`."""
    if not _takes(inputs):
        return defensivekv.mean_attention(inputs, config)
    return _window_attention(inputs, 1, largest=False)


def defensive_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Twin of `defensivekv.defensive_scores`, for maxima in the pooling."""
    # Its mean over the tokens would count absent ones.
    pooling = config.of(Pooling)
    if pooling.pooling != "max" or not _takes(inputs) or inputs.num_absent is not None:
        return defensivekv.defensive_scores(inputs, config)
    worst = _window_attention(inputs, pooling.kernel_size, largest=True)
    return torch.maximum(worst, worst.mean(dim=-1, keepdim=True))


def probe_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Twin of `probe.probe_scores`."""
    return probe.scores_with(_probed_scores, inputs, config)


def projected_value_norms(value: torch.Tensor, projection: OutputProjection) -> torch.Tensor:
    """Twin of `value_norms.projected_value_norms`; products and sums are float32 throughout."""
    if projection.packed is None:
        return references.projected_value_norms(value, projection)
    return _call("value_norms", _rows(value), projection.packed, projection.weight.shape[2])


def select_pruned(
    scores: torch.Tensor,
    weights: torch.Tensor,
    value: torch.Tensor,
    projection: OutputProjection,
    budgets: torch.Tensor,
    num_retained: int,
    of_stage_1: torch.Tensor,
    eps: float,
    num_absent: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `pruning.select_pruned`."""
    given = (scores, weights, value, projection, budgets)
    if projection.packed is None:
        return pruning.select_pruned(*given, num_retained, of_stage_1, eps, num_absent)
    return select_and_project(*given, of_stage_1, eps, num_absent)[0]


def select_and_project(
    scores: torch.Tensor,
    weights: torch.Tensor,
    value: torch.Tensor,
    projection: OutputProjection,
    budgets: torch.Tensor,
    of_stage_1: torch.Tensor,
    eps: float,
    num_absent: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects as `select_pruned`, and returns also the norms that it took, 0 elsewhere."""
    group, hidden_size = projection.weight.shape[2:]
    selected: tuple[torch.Tensor, torch.Tensor] = torch.ops.vllm_kvselect.select_pruned(
        _rows(scores),
        _rows(weights),
        _rows(value),
        projection.packed,
        group,
        projection.bound_form,
        math.sqrt(hidden_size) * pruning.rounding_factor(value.dtype, value.shape[2], hidden_size),
        budgets,
        num_absent,
        of_stage_1,
        eps,
    )
    return selected


def best_first(scores: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Twin of `selection.best_first`."""
    if scores.dtype != torch.float32:
        return selection.best_first(scores, counts)
    return _call("best_first", _rows(scores), counts)


def best_mask(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Twin of `selection.best_mask`."""
    if scores.dtype != torch.float32:
        return selection.best_mask(scores, counts)
    return _call("best_mask", _rows(scores), counts)


def select(scores: torch.Tensor, budgets: torch.Tensor, num_retained: int) -> torch.Tensor:
    """Twin of `selection.select`."""
    if scores.dtype != torch.float32:
        return selection.select(scores, budgets, num_retained)
    return _call("best_indices", _rows(scores), budgets, num_retained)


def extremes(vectors: torch.Tensor, size: int) -> Extremes:
    """Twin of `criticality.extremes`."""
    if vectors.dtype not in STORED:
        return references_of_prefill.extremes(vectors, size)
    return Extremes(*_call("extremes", _rows(vectors), size))


def criticality(
    queries: Extremes, keys: Extremes, scale: float, num_before: torch.Tensor
) -> torch.Tensor:
    """Twin of `criticality.criticality`."""
    if keys.largest.dtype not in STORED:
        return references_of_prefill.criticality(queries, keys, scale, num_before)
    middle = references_of_prefill.middle_of(queries, len(keys.largest)).contiguous()
    logits = _call("critical_logits", middle, *map(_rows, keys), scale, num_before)
    return logits.softmax(dim=-1)


def _share_out(
    scores: torch.Tensor, num_packed: Sequence[int], block_size: int, share: int, unit: int
) -> torch.Tensor:
    """Twin of `allocation.share_out`."""
    if scores.dtype != torch.float32:
        return allocation.share_out(scores, num_packed, block_size, share, unit)
    return _call("share_out", _rows(scores), num_packed, block_size, share, unit)


def _takes(inputs: ScoringInputs) -> bool:
    """Whether the kernel of the window's attention takes such keys."""
    key = inputs.key
    return key.dtype in STORED and key.shape[2] % 2 == 0


def _similarities(inputs: ScoringInputs, threshold: float) -> torch.Tensor:
    """Twin of `r_kv.similarities`."""
    if not _takes(inputs):
        return r_kv.similarities(inputs, threshold)
    key, multiplied = _rows(inputs.key), multiplied_dtype(inputs.key.dtype)
    return _call("similarities", key, threshold, inputs.num_absent, multiplied)


def _probed_scores(inputs: ScoringInputs, first_position: int) -> torch.Tensor:
    """Twin of `probe.probed_scores`, for rotations whose pairs are not neighbours (NeoX)."""
    rotation, key = inputs.rotation, inputs.key
    if key.dtype not in STORED or (rotation is not None and rotation.interleaved):
        return probe.probed_scores(inputs, first_position)
    assert inputs.probe is not None
    tables = [key.new_empty(key.shape[1], 0, dtype=torch.float32)] * 2
    if rotation is not None:
        tables = [_rows(table.float()) for table in rotation.rows(first_position, key.shape[1])]
    weights = inputs.probe.T.float().contiguous()
    given = (_rows(key), _rows(inputs.value), weights, *tables)
    return _call("probe_scores", *given, first_position, probe.PER_TOKEN)


def _window_attention(inputs: ScoringInputs, kernel_size: int, largest: bool) -> torch.Tensor:
    """The mean or the maximum over the window's rows, max-pooled."""
    sinks = None if inputs.sinks is None else inputs.sinks.float()
    multiplied = multiplied_dtype(inputs.key.dtype)
    options = (inputs.scale, kernel_size, sinks, inputs.num_absent, multiplied, largest)
    return _call("window_attention", _rows(inputs.query), _rows(inputs.key), *options)


def _call(operator: str, *arguments: object) -> torch.Tensor:
    result: torch.Tensor = getattr(torch.ops.vllm_kvselect, operator)(*arguments)
    return result


def _operator(reference: Function) -> Function:
    """The operator of a reference's name, which takes what the reference takes, by position."""

    @wraps(reference)
    def twin(*arguments: object) -> torch.Tensor:
        return _call(reference.__name__, *arguments)

    return cast("Function", twin)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The kernels read rows of neighbouring elements, at any stride between rows."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


read_pages = _operator(compaction.read_pages)
read_entries = _operator(compaction.read_entries)
write_entries = _operator(compaction.write_entries)
look_up = _operator(compaction.look_up)

KERNELS = Kernels(
    snapkv_scores=snapkv_scores,
    mean_attention=mean_attention,
    defensive_scores=defensive_scores,
    r_kv_scores=partial(r_kv.r_kv_scores, similarities=_similarities),
    probe_scores=probe_scores,
    projected_value_norms=projected_value_norms,
    select_pruned=select_pruned,
    adaptive_pages=partial(allocation.adaptive_pages, best_first=best_first, share_out=_share_out),
    shared_pages=partial(allocation.shared_pages, share_out=_share_out),
    best_first=best_first,
    best_mask=best_mask,
    select=select,
    read_pages=read_pages,
    read_entries=read_entries,
    write_entries=write_entries,
    look_up=look_up,
    extremes=extremes,
    criticality=criticality,
)
