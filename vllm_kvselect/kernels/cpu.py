"""Twins for CPU in C++ (`kernels/cpu/`), compiled for this machine when they are first needed.

They take bfloat16 and float32, which oneDNN multiplies with float32 accumulation everywhere; other
dtypes go to the reference. A machine without a C++ compiler serves with the references too.
"""

import math
import subprocess
from functools import cache

import torch

from vllm_kvselect import allocation, compaction, pruning, selection
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels.build import load_library
from vllm_kvselect.methods import METHODS, NO_TWINS, Method, Retention, Twins, choice
from vllm_kvselect.ranking import by_score
from vllm_kvselect.scoring import snapkv
from vllm_kvselect.scoring import value_norms as references
from vllm_kvselect.scoring.value_norms import OutputProjection

_DTYPES = (torch.bfloat16, torch.float32)


class KernelError(RuntimeError):
    """The kernels cannot be used on this machine: says why and what to do."""


@cache
def load() -> Twins:
    """Compiles the kernels, or finds them compiled, and tries them.

    The first call on a machine takes about 25 s; the result is kept in torch's folder for
    extensions (`TORCH_EXTENSIONS_DIR`).

    Returns:
        Each reference with its twin, for `methods.retain`.

    Raises:
        KernelError: If there is no compiler, or the machine lacks the instructions.
    """
    try:
        load_library()
        _try()
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise KernelError(
            f"the CPU kernels are not available ({reason[0]}); install g++ and ninja"
        ) from error
    return TWINS


def _try() -> None:
    """Runs both products once: what oneDNN cannot do here is known before anything is served."""
    for dtype in _DTYPES:
        key, query = torch.zeros(1, 2, 16, dtype=dtype), torch.zeros(1, 1, 16, dtype=dtype)
        _call("snapkv_scores", query, key, 1.0, 1)
        _call("value_norms", key, _call("pack_weight", torch.zeros(1, 16, 1, 16, dtype=dtype)), 1)


def pack(projection: OutputProjection) -> OutputProjection:
    """Adds the weight in the order in which the kernels read it; it takes as much memory again."""
    weight = projection.weight
    if weight.dtype not in _DTYPES or weight.shape[1] % 2:
        return projection
    return projection._replace(packed=_call("pack_weight", weight))


def snapkv_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    config: EvictionConfig,
    layer_index: int = 0,
) -> torch.Tensor:
    """Twin of `snapkv.snapkv_scores`, for means over the group and maxima in the pooling."""
    if not _scores_here(key, config):
        return snapkv.snapkv_scores(query, key, scale, config, layer_index)
    return _call("snapkv_scores", _rows(query), _rows(key), scale, config.kernel_size)


def _scores_here(key: torch.Tensor, config: EvictionConfig) -> bool:
    as_usual = config.group_reduction == "mean" and config.pooling == "max"
    return as_usual and key.dtype in _DTYPES and key.shape[2] % 2 == 0


def value_norms(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Twin of `scoring.value_norms.value_norms`; products and sums are float32 throughout."""
    if value.dtype not in _DTYPES or value.shape[2] % 2:
        return references.value_norms(value, weight)
    packed = _call("pack_weight", weight.contiguous())
    return _call("value_norms", _rows(value), packed, weight.shape[2])


def select_pruned(
    scores: torch.Tensor,
    weights: torch.Tensor,
    value: torch.Tensor,
    projection: OutputProjection,
    budgets: torch.Tensor,
    num_retained: int,
    alpha: float,
    eps: float,
) -> torch.Tensor:
    """Twin of `pruning.select_pruned`."""
    if projection.packed is None:
        return pruning.select_pruned(
            scores, weights, value, projection, budgets, num_retained, alpha, eps
        )
    return select_and_project(scores, weights, value, projection, budgets, alpha, eps)[0]


def select_and_project(
    scores: torch.Tensor,
    weights: torch.Tensor,
    value: torch.Tensor,
    projection: OutputProjection,
    budgets: torch.Tensor,
    alpha: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects as `select_pruned`, and returns also the norms that it took, 0 elsewhere."""
    selected: tuple[torch.Tensor, torch.Tensor] = torch.ops.vllm_kvselect.select_pruned(
        _rows(scores),
        _rows(weights),
        _rows(value),
        projection.packed,
        projection.weight.shape[2],
        projection.bound_form,
        _bound_factor(value, projection),
        budgets,
        alpha,
        eps,
    )
    return selected


def _bound_factor(value: torch.Tensor, projection: OutputProjection) -> float:
    hidden_size = projection.weight.shape[3]
    return math.sqrt(hidden_size) * pruning.rounding_factor(value, hidden_size)


def adaptive_pages(
    scores: torch.Tensor, num_packed: int, block_size: int, config: EvictionConfig
) -> torch.Tensor:
    """Twin of `allocation.adaptive_pages`, for a blended floor."""
    if scores.dtype != torch.float32 or config.floor != "blend":
        return allocation.adaptive_pages(scores, num_packed, block_size, config)
    share, unit = _share_of_even(config)
    return _call("adaptive_pages", _rows(scores), num_packed, block_size, share, unit)


def _share_of_even(config: EvictionConfig) -> tuple[int, int]:
    """Share of the even budget that is blended into a head's, and the unit it is in."""
    return round(config.safeguard * allocation.SAFEGUARD_UNIT), allocation.SAFEGUARD_UNIT


def stage_1_mask(scores: torch.Tensor, budgets: torch.Tensor, alpha: float) -> torch.Tensor:
    """Twin of `selection.stage_1_mask`."""
    if scores.dtype != torch.float32:
        return selection.stage_1_mask(scores, budgets, alpha)
    return _call("best_mask", _rows(scores), selection.stage_1_counts(budgets, alpha))


def select(scores: torch.Tensor, budgets: torch.Tensor, num_retained: int) -> torch.Tensor:
    """Twin of `selection.select`."""
    if scores.dtype != torch.float32:
        return selection.select(scores, budgets, num_retained)
    return _call("best_indices", _rows(scores), budgets, num_retained)


def retain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output_projection: OutputProjection | None,
    scale: float,
    num_packed: int,
    block_size: int,
    config: EvictionConfig,
    layer_index: int = 0,
    twins: Twins = NO_TWINS,
) -> Retention:
    """Twin of `methods.retain`: SnapKV and AdaKV in one call, others of the parts above.

    A call of PyTorch takes a few microseconds, and there is a layer's worth of them in each prompt.
    """
    method, projection = METHODS[config.method], output_projection
    packed = projection.packed if projection else None
    if not (_in_one_call(method, config) and _scores_here(key, config)) or (
        method.perturbation and packed is None
    ):
        sizes = (scale, num_packed, block_size)
        return choice.retain(query, key, value, projection, *sizes, config, layer_index, twins)
    share, unit = _share_of_even(config)
    if method.allocator is allocation.uniform_pages:
        share = unit
    retained, offsets = torch.ops.vllm_kvselect.retain(
        _rows(query),
        _rows(key),
        _rows(value),
        scale,
        config.kernel_size,
        num_packed,
        block_size,
        share,
        unit,
        packed if method.perturbation else None,
        projection.weight.shape[2] if projection else 0,
        projection.bound_form if projection else None,
        _bound_factor(value, projection) if projection else 0.0,
        config.alpha,
        config.eps,
    )
    return Retention(retained, offsets)


def _in_one_call(method: Method, config: EvictionConfig) -> bool:
    """Whether a method is SnapKV or AdaKV, each with a second stage or without, as published."""
    blended = method.allocator is allocation.adaptive_pages and config.floor == "blend"
    return (
        method.scorer is snapkv.snapkv_scores
        and method.ranking is by_score
        and method.two_stages == method.perturbation
        and not method.pooled
        and (blended or method.allocator is allocation.uniform_pages)
        and not (method.perturbation and config.stage_2_scores == "unpooled")
    )


def read_pages(cache: torch.Tensor, pages: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Twin of `compaction.read_pages`."""
    return _call("read_pages", cache, pages, places)


def gather_entries(
    entries: torch.Tensor, retained: torch.Tensor, num_competing: int
) -> torch.Tensor:
    """Twin of `compaction.gather_entries`."""
    return _call("gather_entries", _rows(entries), retained, num_competing)


def _call(operator: str, *arguments: object) -> torch.Tensor:
    result: torch.Tensor = getattr(torch.ops.vllm_kvselect, operator)(*arguments)
    return result


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The kernels read rows of neighbouring elements, at any stride between rows."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


TWINS: Twins = {
    choice.retain: retain,
    snapkv.snapkv_scores: snapkv_scores,
    references.value_norms: value_norms,
    pruning.select_pruned: select_pruned,
    allocation.adaptive_pages: adaptive_pages,
    selection.stage_1_mask: stage_1_mask,
    selection.select: select,
    compaction.read_pages: read_pages,
    compaction.gather_entries: gather_entries,
}
