"""Schedules gives plans with which the kernel computes what it does with plans made anew."""

from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from vllm import _custom_ops as ops

from vllm_kvselect.engine.cpu import schedules as cpu_schedules
from vllm_kvselect.engine.cpu.schedules import TILE, Schedules
from vllm_kvselect.engine.platforms import has_fp8_caches
from vllm_kvselect.engine.view.page_tables import SettledRows
from vllm_kvselect.engine.view.sequences import Call, HeadwiseBatch
from vllm_kvselect.paging.page_table import PageTable

NUM_KV_HEADS, GROUP, HEAD_SIZE = 3, 2, 64
WIDTH = 8
"""Pages that a sequence may have."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts the plans that are made."""
    counted = Mock(wraps=ops.cpu_attn_get_scheduler_metadata)
    monkeypatch.setattr(cpu_schedules.ops, "cpu_attn_get_scheduler_metadata", counted)
    return counted


@pytest.fixture(params=[1, 4], ids=lambda count: f"{count}-threads")
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """More threads than one share the tokens of a sequence."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def step(pages: torch.Tensor, seq_lens: torch.Tensor, retained: torch.Tensor) -> HeadwiseBatch:
    """A step of decoding rows.

    Args:
        pages: `[1, num_rows * num_kv_heads, width]`, of one layer.
        seq_lens: Tokens of the rows.
        retained: Tokens less that each of their heads has, `[num_rows, num_kv_heads]`.
    """
    num_rows = len(seq_lens)
    lens = (seq_lens[:, None] - retained).flatten().to(torch.int32)
    tokens, unused = slice(0, num_rows), torch.empty(0)
    return HeadwiseBatch(
        tokens=tokens,
        pairs=(tokens,),
        query_start_loc=torch.arange(len(lens) + 1, dtype=torch.int32),
        max_query_len=1,
        max_seq_len=int(seq_lens.max()),
        rows=SettledRows(unused, seq_lens, unused, unused, unused),
        table=PageTable(pages, lens[None]),
    )


def only_call(batch: HeadwiseBatch) -> Call:
    (call,) = batch.calls(batch.by_layer[0], NUM_KV_HEADS, None)
    return call


def attend(
    query: torch.Tensor, cache: torch.Tensor, call: Call, plan: torch.Tensor
) -> torch.Tensor:
    output = torch.empty_like(query)
    key, value = cache.chunk(2, dim=2)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=key,
        value_cache=value,
        output=output,
        query_start_loc=call.query_start_loc,
        seq_lens=call.table.seq_lens,
        scale=0.125,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=call.table.pages,
        softcap=0.0,
        scheduler_metadata=plan,
        s_aux=None,
    )
    return output


@pytest.mark.parametrize("block_size", [32, 128])
@pytest.mark.parametrize("isa", ["amx", "vec", "vec16"])
def test_a_kept_plan_computes_what_a_plan_of_the_very_lengths_does(
    isa: str, block_size: int, num_threads: int, made: Mock
) -> None:
    if isa == "amx" and not torch.cpu._init_amx():
        pytest.skip("this processor has no AMX tiles")
    num_rows = 3
    pages = torch.randperm(num_rows * NUM_KV_HEADS * WIDTH, dtype=torch.int32)
    pages = pages.view(1, num_rows * NUM_KV_HEADS, WIDTH)
    cache = torch.randn(pages.numel(), 1, 2 * block_size, HEAD_SIZE).to(torch.bfloat16)
    query = torch.randn(num_rows * NUM_KV_HEADS, GROUP, HEAD_SIZE).to(torch.bfloat16)
    longest = WIDTH * block_size
    # Heads differ by whole pages.
    retained = torch.tensor([[0, 1, 5], [2, 0, 0], [1, 1, 0]]) * block_size
    first_lens = torch.tensor([longest - 2 * TILE, 3 * block_size - 7, 2 * block_size + 1])
    schedules, exact = Schedules(isa), Schedules(isa)
    num_steps, num_made = 2 * TILE, 0
    for grown in range(num_steps):
        batch = step(pages, first_lens + grown, retained)
        call = only_call(batch)
        before = made.call_count
        kept = schedules.of(0, batch, call, query)
        num_made += made.call_count - before
        anew = exact._make(call.table.seq_lens, call.query_start_loc, query)
        assert torch.equal(attend(query, cache, call, kept), attend(query, cache, call, anew))
    # Two rows fill two tiles, the last one fills one, all at different steps.
    assert num_made == 1 + 2 + 2 + 1


def test_plans_are_kept_for_every_layer_and_head_of_their_own(made: Mock) -> None:
    pages = torch.zeros(1, NUM_KV_HEADS, WIDTH, dtype=torch.int32)
    seq_lens, retained = torch.tensor([40]), torch.tensor([[0, 0, 32]])
    query = torch.randn(1, GROUP, HEAD_SIZE)
    cache_dtype = "fp8" if has_fp8_caches() else "auto"
    schedules, sinks = Schedules("vec", cache_dtype), torch.zeros(NUM_KV_HEADS * GROUP)
    for _ in range(3):
        batch = step(pages, seq_lens, retained)
        for layer in range(2):
            for call in batch.calls(batch.by_layer[0], NUM_KV_HEADS, sinks):
                schedules.of(layer, batch, call, query)
    lengths = [call.kwargs["seq_lens"].tolist() for call in made.call_args_list]
    assert lengths == [[48], [48], [16]] * 2
    assert {call.kwargs["kv_cache_dtype"] for call in made.call_args_list} == {cache_dtype}


@pytest.mark.parametrize("change", ["nothing", "pages", "rows"])
def test_a_plan_is_made_anew_for_other_pages_and_other_rows(change: str, made: Mock) -> None:
    pages = torch.zeros(1, NUM_KV_HEADS, WIDTH, dtype=torch.int32)
    query = torch.randn(NUM_KV_HEADS, GROUP, HEAD_SIZE)
    retained = torch.tensor([[0, 0, 32]])
    schedules = Schedules("vec")
    first = step(pages, torch.tensor([40]), retained)
    schedules.of(0, first, only_call(first), query)
    if change == "pages":
        pages = pages.clone()
    second = step(pages, torch.tensor([49 if change == "rows" else 41]), retained)
    schedules.of(0, second, only_call(second), query)
    assert made.call_count == (1 if change == "nothing" else 2)


@pytest.mark.parametrize("what", ["several queries", "pages not known before"])
def test_nothing_is_kept_of_steps_that_are_no_decode_steps(what: str, made: Mock) -> None:
    pages = torch.zeros(1, NUM_KV_HEADS, WIDTH, dtype=torch.int32)
    query = torch.randn(NUM_KV_HEADS, GROUP, HEAD_SIZE)
    schedules = Schedules("vec")
    batch = step(pages, torch.tensor([40]), torch.tensor([[0, 0, 32]]))
    call = only_call(batch)
    if what == "several queries":
        batch.max_query_len = 2
    else:
        batch.table = None
    for _ in range(2):
        schedules.of(0, batch, call, query)
    lengths = [call.kwargs["seq_lens"].tolist() for call in made.call_args_list]
    assert lengths == [[40, 40, 8]] * 2
