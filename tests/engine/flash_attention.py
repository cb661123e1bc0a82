"""Stand-ins for FlashAttention: plain PyTorch in float64, for arguments that the real calls take.

Names are checked against vLLM's own signatures, shapes, strides and dtypes against what the kernels
want.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from torch.utils._python_dispatch import _disable_current_modes
from vllm import _custom_ops
from vllm.v1.attention.backends import flash_attn

from tests import oracle
from vllm_kvselect.engine.cuda import any_order

FP8 = torch.float8_e4m3fn
DTYPES = {torch.bfloat16}
"""Of queries and of an unquantised cache; the real calls take float16 too."""

TILE, NUM_PROCESSORS = 128, 132
"""Of FlashAttention 3 on an H100."""

FILLER = -9
"""What a schedule has where nobody reads it; the real one leaves anything there."""

PADDING = -1
"""Slot of a token that pads a batch."""


def _interface() -> Any:
    """vLLM's interface to FlashAttention; its package wants the compiled kernels."""
    path = Path(vllm.__file__).parent / "vllm_flash_attn" / "flash_attn_interface.py"
    spec = importlib.util.spec_from_file_location("flash_attn_interface", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


INTERFACE = _interface()


def stand_in(real: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the decorated function with what the real one would get, its defaults included.

    It computes on the host: what it reads there is no synchronisation.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(real).bind(*args, **kwargs)
            bound.apply_defaults()
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return function(**bound.arguments)

        return call

    return decorate


def _is_rows(tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> bool:
    """Whether a tensor has a shape and rows of neighbouring elements."""
    return tensor.dtype == dtype and tensor.shape == shape and tensor.stride(-1) == 1


@stand_in(INTERFACE.flash_attn_varlen_func)
def flash_attn_varlen_func(**given: Any) -> torch.Tensor:
    q, k, v, out = (given[name] for name in ("q", "k", "v", "out"))
    starts, lengths, pages = (given[name] for name in ("cu_seqlens_q", "seqused_k", "block_table"))
    num_sequences, num_heads, head_size = len(lengths), *q.shape[1:]
    num_pages, page_size, num_kv_heads, _ = k.shape
    quantized = k.dtype == FP8
    assert k.dtype == v.dtype == q.dtype
    assert quantized or q.dtype in DTYPES
    assert _is_rows(q, q.dtype, len(q), num_heads, head_size)
    assert _is_rows(out, torch.bfloat16 if quantized else q.dtype, *q.shape)
    assert page_size % 16 == 0
    assert num_heads % num_kv_heads == 0
    for cache in (k, v):
        assert _is_rows(cache, k.dtype, num_pages, page_size, num_kv_heads, head_size)
        # FlashAttention 3 copies with TMA: strides are multiples of 16 bytes, of size 1 too.
        assert all(stride * cache.element_size() % 16 == 0 for stride in cache.stride()[:3])
        assert num_kv_heads > 1 or cache.stride(2) == head_size
    assert _is_rows(starts, torch.int32, num_sequences + 1)
    assert lengths.dtype == torch.int32
    assert lengths.shape == (num_sequences,)
    assert lengths.is_contiguous()
    assert _is_rows(pages, torch.int32, num_sequences, pages.shape[1])
    for name in ("q_descale", "k_descale", "v_descale"):
        assert given[name].dtype == torch.float32
        assert given[name].shape == (num_sequences, num_kv_heads)
    assert given["fa_version"] == 3
    assert given["causal"] is True
    before, after = given["window_size"] or (-1, -1)
    assert after == (-1 if before == -1 else 0)
    assert isinstance(given["num_splits"], int)
    if given["scheduler_metadata"] is not None:
        sizes = num_kv_heads, given["max_seqlen_q"], head_size, given["num_splits"]
        _check_schedule(given["scheduler_metadata"], lengths, *sizes)
    for name in ("alibi_slopes", "mask_mod", "aux_tensors", "dynamic_causal"):
        assert given[name] is None
    sinks = given["s_aux"]
    if sinks is not None:
        assert sinks.dtype in DTYPES
        assert sinks.shape == (num_heads,)
        assert sinks.is_contiguous()
    assert given["softcap"] == 0
    assert given["cu_seqlens_k"] is None
    for sequence in range(num_sequences):
        first, last = starts[sequence : sequence + 2].tolist()
        length = int(lengths[sequence])
        assert 0 <= last - first <= given["max_seqlen_q"]
        assert 0 <= length <= min(given["max_seqlen_k"], pages.shape[1] * page_size)
        used = pages[sequence, : -(-length // page_size)].long()
        assert ((used >= 0) & (used < num_pages)).all()
        key, value = (cache[used].flatten(0, 1)[:length].double() for cache in (k, v))
        query = q[first:last].double() * given["q_descale"][sequence, 0]
        key *= given["k_descale"][sequence][:, None]
        value *= given["v_descale"][sequence][:, None]
        result = attention(query, key, value, given["softmax_scale"], before, sinks)
        out[first:last] = result.to(out.dtype)
    return out


def _schedule(
    lengths: list[int], num_kv_heads: int, max_seqlen_q: int, head_size: int, most: int
) -> list[int]:
    """A schedule of sequences of one query and one head; of others what tells whose it is."""
    n = len(lengths)
    unused = [FILLER] * (-n % 4)
    if num_kv_heads > 1 or max_seqlen_q > 1:
        # vLLM's builder keeps it in a buffer of its own where there are full graphs.
        return [n, *lengths, *unused, *[0] * 3 * (n + len(unused))]
    num_vectors = 3 if 64 < head_size <= 128 else 2
    *vectors, end = oracle.schedule(lengths, TILE, NUM_PROCESSORS, max(most, 1), num_vectors)
    return [number for vector in vectors for number in vector + unused] + end


def _check_schedule(schedule: torch.Tensor, lengths: torch.Tensor, *given: int) -> None:
    """Made for these sequences: one of other sequences gives wrong output without an error."""
    assert schedule.is_contiguous()
    assert schedule.dtype == torch.int32
    pairs = zip(schedule.tolist(), _schedule(lengths.tolist(), *given), strict=True)
    assert all(found == wanted or wanted == FILLER for found, wanted in pairs)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    before: int = -1,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal, aligned to the last query; a query that sees nothing gets zeros.

    With `before >= 0` a query sees so many tokens before its own. The sink of a query head takes
    its share of every row.
    """
    group, (num_queries, num_keys) = query.shape[1] // key.shape[1], (len(query), len(key))
    if not num_keys or not num_queries:
        return torch.zeros_like(query)
    by_head = query.unflatten(1, (-1, group))
    logits = torch.einsum("qhgd,khd->hgqk", by_head, key) * scale
    last_seen = torch.arange(num_queries) + num_keys - num_queries
    positions = torch.arange(num_keys)
    hidden = positions > last_seen[:, None]
    if before >= 0:
        hidden |= positions < last_seen[:, None] - before
    logits = logits.masked_fill(hidden, -torch.inf)
    if sinks is None:
        weights = logits.softmax(-1).nan_to_num()
    else:
        of_rows = sinks.double().view(*logits.shape[:2], 1, 1).expand(-1, -1, num_queries, -1)
        weights = torch.cat((logits, of_rows), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hgqk,khd->qhgd", weights, value).flatten(1, 2)


_OPERATOR = """fwd(
    Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(a!)? out,
    Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new,
    Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k,
    Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k,
    Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary,
    Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal,
    int window_size_left, int window_size_right, float softcap, bool is_rotary_interleaved,
    Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux,
    int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k
) -> Tensor[]"""
"""FlashAttention 3's, which vLLM's function calls by position: so it is checked against that."""


def _in_any_order(*given: Any) -> list[torch.Tensor]:
    """The operator: its sequences one by one, by the stand-in for vLLM's function."""
    names = [argument.name for argument in torch.ops._vllm_fa3_C.fwd.default._schema.arguments]
    own = dict(zip(names, given, strict=True))
    q, out, starts, used = (own[name] for name in ("q", "out", "cu_seqlens_q", "seqused_q"))
    assert _is_rows(starts, torch.int32, len(own["seqused_k"]) + 1)
    if used is None:
        used = starts.diff().int()
    else:
        assert _is_rows(used, torch.int32, len(own["seqused_k"]))
    assert (own["is_rotary_interleaved"], own["sm_margin"], own["cp_world_size"]) == (True, 0, 1)
    assert (own["cp_rank"], own["pack_gqa"]) == (0, None)
    named = ("k_new", "v_new", "q_v", "cu_seqlens_k_new", "kv_batch_idx", "leftpad_k", "rotary_cos")
    assert all(own[name] is None for name in (*named, "rotary_sin", "cp_tot_seqused_k"))
    assert own["window_size_left"] == own["window_size_right"] == -1
    if own["scheduler_metadata"] is not None:
        sizes = own["max_seqlen_q"], q.shape[-1], own["num_splits"]
        _check_schedule(own["scheduler_metadata"], own["seqused_k"], own["k"].shape[2], *sizes)
    for sequence, num_queries in enumerate(used.tolist()):
        place, one = int(starts[sequence]), slice(sequence, sequence + 1)
        queries = slice(place, place + num_queries)
        flash_attn_varlen_func(
            q=q[queries],
            k=own["k"],
            v=own["v"],
            out=out[queries],
            cu_seqlens_q=torch.tensor([0, num_queries], dtype=torch.int32),
            max_seqlen_q=own["max_seqlen_q"],
            seqused_k=own["seqused_k"][one],
            max_seqlen_k=own["max_seqlen_k"],
            softmax_scale=own["softmax_scale"],
            causal=own["is_causal"],
            softcap=own["softcap"],
            block_table=own["page_table"][one],
            fa_version=3,
            scheduler_metadata=None,
            num_splits=own["num_splits"],
            s_aux=own["s_aux"],
            **{
                name: None if own[name] is None else own[name][one]
                for name in ("q_descale", "k_descale", "v_descale")
            },
        )
    return [out, out.new_empty(0), out.new_empty(0), out.new_empty(0)]


def _operator(*given: Any) -> list[torch.Tensor]:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return _in_any_order(*given)


_LIBRARY = torch.library.Library("_vllm_fa3_C", "FRAGMENT")
_LIBRARY.define(_OPERATOR)
_LIBRARY.impl("fwd", _operator, "CPU")


@stand_in(_custom_ops.reshape_and_cache_flash)
def reshape_and_cache_flash(**given: Any) -> None:
    slots, block_size = given["slot_mapping"], given["key_cache"].shape[1]
    assert slots.dtype == torch.int64
    used = slots != PADDING
    places = slots[used] // block_size, slots[used] % block_size
    for name in ("key", "value"):
        entries, cache = given[name][: len(slots)][used], given[f"{name}_cache"]
        if given["kv_cache_dtype"] == "auto":
            assert entries.dtype == cache.dtype
            cache[places] = entries
        else:
            cache[places] = quantized(entries, given[f"{name[0]}_scale"]).view(cache.dtype)


def quantized(tensor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (tensor.float() / scale).to(FP8)


@stand_in(INTERFACE.get_scheduler_metadata)
def get_scheduler_metadata(**given: Any) -> torch.Tensor:
    assert given["cache_seqlens"].shape == (given["batch_size"],)
    assert given["cu_seqlens_q"].shape == (given["batch_size"] + 1,)
    of_heads = given["num_heads_kv"], given["max_seqlen_q"], given["headdim"]
    schedule = _schedule(given["cache_seqlens"].tolist(), *of_heads, given["num_splits"])
    return torch.tensor(schedule, dtype=torch.int32)


def install(patch: pytest.MonkeyPatch) -> None:
    """Puts the stand-ins where vLLM's backend looks for the calls, as on an H100."""
    for function in (flash_attn_varlen_func, reshape_and_cache_flash, get_scheduler_metadata):
        patch.setattr(flash_attn, function.__name__, function, raising=False)
    patch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 3)
    patch.setattr(any_order, "num_compute_units", lambda _: NUM_PROCESSORS)
    for feature in ("kv_cache_dtype", "sinks"):
        name = f"flash_attn_supports_{feature}"
        patch.setattr(flash_attn, name, lambda *_, **__: True, raising=False)
