"""Exact pruning with static shapes, over rows; `vllm_kvselect/selecting/pruning.py`.

Which entries are projected, and how many, is known on the device only, and their lists stay there.
All norms would multiply as much as the output projection does in prefill, which is 8 % of an 8B
Llama's weights; those needed are a fraction of them.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_kvselect.kernels.triton.ordering import append, find_cut, sortable, take
from vllm_kvselect.kernels.triton.selection import NUM_WARPS, best_mask, row_block, select
from vllm_kvselect.kernels.triton.value_norms import launch_norms, quadratic_forms
from vllm_kvselect.scoring.held import Held
from vllm_kvselect.selecting import pruning


def select_pruned(
    held: Held,
    scores: torch.Tensor,
    weights: torch.Tensor,
    budgets: torch.Tensor,
    num_retained: Sequence[int],
    of_stage_1: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Twin of `pruning.select_pruned`, on float32 scores; arguments as of `rows.select_pruned`."""

    def norms_of(
        weights: torch.Tensor, taken: torch.Tensor, num_taken: torch.Tensor
    ) -> torch.Tensor:
        return needed_value_norms(held, weights, taken, num_taken, eps).flatten(0, 1)

    parts = pruning.Parts(best_mask, norms_of, select)
    by_head = scores.flatten(0, 1), weights.flatten(0, 1)
    given = (*by_head, budgets, sum(num_retained), of_stage_1, eps)
    num_absent = held.num_absent.flatten() if held.has_absent else None
    return pruning.select_by_parts(parts, *given, num_absent)


def needed_value_norms(
    held: Held, weights: torch.Tensor, taken: torch.Tensor, budgets: torch.Tensor, eps: float
) -> torch.Tensor:
    """Twin of `pruning.needed_value_norms`, over rows, on float32 weights.

    A quarter more entries than stage 2 retains are projected first, twice as many in the reference.

    Args:
        held: What requests hold.
        weights: `[num_rows * num_kv_heads, num_competing]`, not negative, or by rows.
        taken: Entries that are not in the running, bool, of the same shape.
        budgets: Entries per head, those included, `[num_rows * num_kv_heads]` int64.
        eps: Added to the weights.

    Returns:
        `[num_rows, num_kv_heads, num_competing]`: norms where they matter, else 0.
    """
    projections = held.paged.projections
    assert projections is not None
    weights, taken = weights.contiguous(), taken.contiguous()
    num_tokens, hidden_size = held.num_competing, projections.weight.shape[4]
    rounding = pruning.rounding_factor(held.paged.dtype, projections.weight.shape[2], hidden_size)
    factor = math.sqrt(hidden_size) * rounding
    bounds = quadratic_forms(held, projections.bound_form, factor, weights, eps, taken)
    norms, keys = torch.zeros_like(bounds), torch.empty_like(bounds)
    tokens = torch.empty_like(bounds, dtype=torch.int32)
    # Of each head: how many tokens are listed, and how many stage 2 retains.
    counts, num_open = torch.empty(2, budgets.numel(), dtype=torch.int32, device=bounds.device)
    row_options = {"BLOCK": row_block(num_tokens), "num_warps": NUM_WARPS}
    lists = (bounds, num_tokens, tokens, counts, num_open)
    projected = {
        "listed_ptr": tokens,
        "counts_ptr": counts,
        "weights_ptr": weights,
        "keys_ptr": keys,
        "bounds_ptr": bounds,
        "eps": eps,
    }
    _first_kernel[(budgets.numel(),)](budgets, *lists, **row_options)
    launch_norms(held, norms, **projected)
    _second_kernel[(budgets.numel(),)](keys, *lists, **row_options)
    launch_norms(held, norms, **projected)
    return norms


@triton.jit(do_not_specialize=["num_tokens"])
def _first_kernel(
    budgets_ptr, bounds_ptr, num_tokens, tokens_ptr, counts_ptr, open_ptr, BLOCK: tl.constexpr
):
    """Lists the best bounds of a head, a quarter more than stage 2 retains."""
    head = tl.program_id(0).to(tl.int64)
    bounds_ptr += head * num_tokens
    num_taken = 0
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        bounds = tl.load(bounds_ptr + tokens, mask=tokens < num_tokens, other=0.0)
        num_taken += tl.sum((bounds < 0).to(tl.int32))
    num_open = tl.load(budgets_ptr + head).to(tl.int32) - num_taken
    count = tl.minimum(tl.cdiv(5 * num_open, 4), num_tokens - num_taken)
    cut, num_ties = find_cut(bounds_ptr, num_tokens, count, BLOCK)
    num_listed = 0
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < num_tokens
        keys = sortable(tl.load(bounds_ptr + tokens, mask=inside, other=0.0))
        taken, num_ties = take(keys, inside, cut, num_ties)
        num_listed = append(tokens_ptr + head * num_tokens, num_listed, tokens, taken)
    tl.store(counts_ptr + head, num_listed)
    tl.store(open_ptr + head, num_open)


@triton.jit(do_not_specialize=["num_tokens"])
def _second_kernel(
    keys_ptr, bounds_ptr, num_tokens, tokens_ptr, counts_ptr, open_ptr, BLOCK: tl.constexpr
):
    """Lists what else reaches the cut: the key of the last that stage 2 would retain so far."""
    head = tl.program_id(0).to(tl.int64)
    num_open, num_keys = tl.load(open_ptr + head), tl.load(counts_ptr + head)
    cut, _ = find_cut(keys_ptr + head * num_tokens, num_keys, num_open, BLOCK)
    num_listed = 0
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < num_tokens
        bounds = tl.load(bounds_ptr + head * num_tokens + tokens, mask=inside, other=0.0)
        reaching = inside & (sortable(bounds) >= cut)
        num_listed = append(tokens_ptr + head * num_tokens, num_listed, tokens, reaching)
    tl.store(counts_ptr + head, num_listed)
