"""The CUDA backends on CPU tensors: vLLM's builders and impls, Triton's interpreter.

FlashAttention's calls have stand-ins, Triton's run as they are. Every step's outputs are those of
the float64 oracle, which knows what each head retained.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn, triton_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheLayout

from tests.engine import flash_attention, triton_attention
from tests.engine.cuda_layers import WIDE, Layers, vllm_config
from tests.engine.cuda_requests import HEAD_SIZE, MAX_NUM_SEQS, NUM_KV_HEADS, NUM_LAYERS, Request
from tests.kernels.unsynchronised import unsynchronised
from vllm_kvselect.config import ConfigError, EvictionConfig
from vllm_kvselect.engine.cuda import any_order, tables
from vllm_kvselect.engine.cuda.backends import refuse_large_view
from vllm_kvselect.engine.cuda.builder import DeviceSplitter
from vllm_kvselect.engine.cuda.flash_attention import HeadwiseFlashAttentionBackend
from vllm_kvselect.engine.cuda.tables import HeadwiseTables, buffer_bytes
from vllm_kvselect.engine.cuda.triton_attention import HeadwiseTritonAttentionBackend
from vllm_kvselect.engine.cuda.warm_up import warm_up
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.engine.platforms import PLATFORMS
from vllm_kvselect.engine.step.split import Split
from vllm_kvselect.engine.view.page_tables import SettledRows
from vllm_kvselect.engine.view.sequences import HeadwiseBatch
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.paging.order import Sharing, padded
from vllm_kvselect.registry import METHODS

pytest.importorskip("triton")
from vllm_kvselect.kernels import cuda

WINDOW, BUDGET = 8, 48


def eviction(method: str = "adakv-perturb", **values: Any) -> EvictionConfig:
    return EvictionConfig.parse({"method": method, "window": WINDOW, "budget": BUDGET, **values})


FLASH, TRITON = HeadwiseFlashAttentionBackend, HeadwiseTritonAttentionBackend
STOCK = {FLASH: FlashAttentionMetadata, TRITON: TritonAttentionMetadata}
CALLS = {
    FLASH: ((any_order, "attend"), (flash_attn, "flash_attn_varlen_func")),
    TRITON: ((triton_attn, "unified_attention"),),
}
SCORERS = ("snapkv", "knorm", "defensivekv")
"""A method of each way to score by attention."""
DTYPES = {FLASH: "bfloat16", TRITON: "float32"}
"""The interpreter multiplies bfloat16 by its bits, and vLLM's kernel does not work around that."""


TABLES = replace(
    WIDE, headwise_page_table=cuda.headwise_page_table, longest_first=cuda.longest_first
)
"""The kernels of every step, and references for those of cuts, which take less time."""


@pytest.fixture(autouse=True)
def stand_ins() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        flash_attention.install(patch)
        triton_attention.install(patch)
        yield


@pytest.fixture(params=DTYPES, ids=lambda backend: backend.get_name())
def backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@cache
def config(dtype: str, kv_cache_dtype: str, graphs: bool) -> VllmConfig:
    return vllm_config(kv_cache_dtype, graphs, dtype)


def make_layers(
    backend: Any,
    method: str = "adakv-perturb",
    kernels: Kernels = REFERENCES,
    kv_cache_dtype: str = "auto",
    graphs: bool = False,
    with_sinks: bool = False,
    layers_class: Any = Layers,
    **values: Any,
) -> Any:
    made = config(DTYPES[backend], kv_cache_dtype, graphs)
    return layers_class(eviction(method, **values), kernels, made, backend, with_sinks)


def mixed_steps(layers: Layers) -> list[Request]:
    """Prefill, chunks, completions, decodes, all in each other's company and in changing order."""
    long, short, chunked = (
        layers.request(num_prompt, num_prompt + 20) for num_prompt in (100, 20, 90)
    )
    assert long.prompt.next_cut
    assert short.prompt.next_cut is None
    layers.step((long, 100), (short, 20))
    layers.step((long, 1), (short, 1))
    layers.step((long, 1), (short, 1), (chunked, 60))
    layers.step((short, 1), (long, 1), (chunked, 26))  # ends inside the window
    layers.step((long, 1), (chunked, 4))
    layers.step((chunked, 1), (short, 1), (long, 1))
    layers.step((long, 3), (chunked, 1), (short, 2))
    layers.preempt(long)
    layers.step((chunked, 1), (long, 70))
    layers.step((chunked, 1), (long, 30))
    layers.step((chunked, 1), (long, 6))  # what it had generated comes at once
    layers.step((long, 1), (chunked, 1), (short, 1))
    return [long, short, chunked]


@pytest.mark.parametrize(
    ("method", "backend"),
    [("adakv-perturb", FLASH), ("layer-defensivekv", FLASH), ("adakv-perturb", TRITON)],
)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_every_step_is_that_of_the_oracle_with_the_kernels(
    method: str, backend: Any, with_sinks: bool
) -> None:
    layers = make_layers(backend, method, cuda.KERNELS, with_sinks=with_sinks)
    mixed_steps(layers)


@pytest.mark.parametrize(
    ("method", "with_sinks"),
    [*((method, False) for method in METHODS), *((method, True) for method in SCORERS)],
)
def test_every_step_is_that_of_the_oracle(method: str, with_sinks: bool) -> None:
    layers = make_layers(FLASH, method, WIDE, with_sinks=with_sinks)
    mixed_steps(layers)


def test_a_batch_that_drops_nothing_is_stock(backend: Any) -> None:
    layers = make_layers(backend)
    short = layers.request(20, 25)
    for num_new in (12, 8, 1):
        assert isinstance(layers.step((short, num_new)), STOCK[backend])


def test_rows_without_a_cut_keep_vllms_call_beside_rows_with_one(backend: Any) -> None:
    layers = make_layers(backend)
    long, short = layers.request(100, 110), layers.request(20, 30)
    stock = layers.step((long, 100), (short, 20))
    assert isinstance(stock, Split)
    assert [part.tokens for part in stock.parts] == [None]  # all of the batch, untouched
    mixed = layers.step((long, 2), (short, 1))
    before, after = mixed.parts
    assert (before.metadata.num_actual_tokens, after.max_query_len) == (1, 2)


@pytest.fixture
def fp8_as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's cast to fp8 loses carries; and nothing rounds weights to it."""
    monkeypatch.setattr(triton_attention.H100, "is_cuda", lambda _: False)
    write = flash_attention.reshape_and_cache_flash
    monkeypatch.setattr(triton_attn, "triton_reshape_and_cache_flash", write)


# With fp8 queries vLLM's Triton kernel rounds weights to fp8 too; see the next test.
@pytest.mark.usefixtures("fp8_as_on_a_card")
@pytest.mark.parametrize(("backend", "with_queries"), [(FLASH, True), (TRITON, False)])
def test_an_fp8_cache_is_scored_and_moved_as_attention_reads_it(
    backend: Any, with_queries: bool
) -> None:
    layers = make_layers(backend, kernels=cuda.KERNELS, kv_cache_dtype="fp8")
    scale_of_queries = 0.25 if with_queries else 1
    assert layers.layers[0].impl._score_scale == HEAD_SIZE**-0.5 * scale_of_queries
    mixed_steps(layers)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_the_view_gives_bit_for_bit_what_vllms_call_gives(kv_cache_dtype: str) -> None:
    layers = make_layers(TRITON, kv_cache_dtype=kv_cache_dtype, graphs=True)
    short, other = layers.request(20, 30), layers.request(45, 50)
    rows = (short, 20), (other, 45)
    common = layers.common(rows)
    layers.forward(rows, common, layers.builder.build(0, common))
    short.num_computed, other.num_computed = 20, 45
    rows = (short, 1), (other, 1)
    common = layers.common(rows)
    through_view = layers.builder.build(0, common)
    assert isinstance(through_view, Split)
    layers.builder.largest_full_graph = 0
    stock = layers.builder.build(0, common)
    assert isinstance(stock, STOCK[TRITON])
    outputs = [layers.forward(rows, common, metadata) for metadata in (through_view, stock)]
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))


def test_an_fp8_cache_with_scales_per_head_is_refused(backend: Any) -> None:
    layers = make_layers(backend, kv_cache_dtype="fp8")
    layer = layers.layers[0]
    layer._k_scale = torch.ones(NUM_KV_HEADS)
    with pytest.raises(ConfigError, match=r"scales per head.*--kv-cache-dtype bfloat16"):
        layer.impl.start(0, layer, layers.state, layers.builder.tables, torch.bfloat16, REFERENCES)


class Gathers(TorchDispatchMode):
    """Takes down what is copied by indices meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_select):
            self.places.append(args[0].untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))


TRIAL = {
    "softmax_scale": 0.1,
    "causal": True,
    "fa_version": 3,
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), torch.ones(1, 1).expand(6, 1)),
}
"""What is given with its queries, keys and values."""


@pytest.mark.parametrize(
    ("head_size", "tile", "longest_first"),
    [(64, 192, REFERENCES.longest_first), (128, 128, cuda.longest_first)],
    ids=["references", "kernels"],
)
def test_how_flash_attention_shares_sequences_out_is_found_in_its_schedules(
    head_size: int, tile: int, longest_first: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For heads of 65 to 128 channels they have a vector more."""
    monkeypatch.setattr(flash_attention, "TILE", tile)
    dtypes = torch.bfloat16, torch.bfloat16
    trial = any_order.Trial(4, head_size, 16, dtypes, torch.device("cpu"), TRIAL, longest_first)
    assert trial.sharing(32) == Sharing(tile, 132, 32, 2 if head_size == 64 else 3)


@pytest.mark.parametrize("reason", ["other parts", "more vectors", "other results", "no parts"])
def test_where_schedules_are_not_what_we_know_flash_attention_makes_its_own(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, schedule, warning = any_order.attend, flash_attn.get_scheduler_metadata, Mock()

    def other_schedule(**given: Any) -> torch.Tensor:
        made, size = schedule(**given), padded(given["batch_size"])
        if given["num_heads_kv"] > 1:  # stock's
            return made
        if reason == "other parts":
            made[size] += 1
            return made
        return torch.cat((made[:size], made[:size], made))

    def other_results(given: Any, *order: torch.Tensor) -> None:
        attend(given, *order)
        if given["scheduler_metadata"] is not None:
            given["out"].add_(1)

    if reason == "other results":
        monkeypatch.setattr(any_order, "attend", other_results)
    elif reason == "no parts":
        settings = config(DTYPES[FLASH], "auto", True).attention_config
        monkeypatch.setattr(settings, "flash_attn_max_num_splits_for_cuda_graph", 1)
    else:
        monkeypatch.setattr(flash_attn, "get_scheduler_metadata", other_schedule)
    monkeypatch.setattr(any_order.logger, "warning", warning)
    layers = make_layers(FLASH, "knorm", WIDE, graphs=True)
    assert warning.call_count == (reason != "no parts")
    told = []

    def noted(given: Any, *order: torch.Tensor) -> None:
        told.append(given["scheduler_metadata"] is not None)
        attend(given, *order)

    monkeypatch.setattr(any_order, "attend", noted)
    long = layers.request(100, 110)
    layers.step((long, 100))
    layers.step((long, 1))
    assert told == [False] * NUM_LAYERS


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_no_output_is_copied_before_it_is_written(with_sinks: bool) -> None:
    layers = make_layers(FLASH, "knorm", WIDE, with_sinks=with_sinks)
    long, short, other = (layers.request(n, n + 10) for n in (100, 20, 24))
    layers.step((long, 100), (short, 20), (other, 20))
    # Neither the rows past their cuts nor those before are neighbours.
    rows = (short, 1), (long, 3), (other, 1)
    common = layers.common(rows)
    metadata = layers.build(rows, common)
    before, after = metadata.parts
    assert isinstance(before.tokens, torch.Tensor)
    assert after.max_query_len == 3
    gathers = Gathers()
    outputs = layers.forward(rows, common, metadata, guard=lambda: gathers)
    assert gathers.places
    assert not {output.untyped_storage().data_ptr() for output in outputs} & {*gathers.places}
    layers.check(rows, outputs)


@pytest.mark.parametrize("num_splits", [0, 32])
def test_sequences_with_queries_enough_are_not_split(num_splits: int) -> None:
    impl = make_layers(FLASH).layers[0].impl
    assert impl.num_queries_per_kv == 2
    batches = [SimpleNamespace(max_query_len=n, num_splits=num_splits) for n in (1, 255, 256)]
    assert [impl._num_splits(batch) for batch in batches] == [num_splits, num_splits, 1]


class Replays:
    """A decode step captured once, for more rows than there are, and what its calls were given."""

    def __init__(
        self, backend: Any, layers: Layers, num_rows: int, patch: pytest.MonkeyPatch
    ) -> None:
        self.layers, self.num_rows, self.calls = layers, num_rows, []
        of_the_graph = {"q", "out"}  # its own memory
        if layers.layers[0].impl.sinks is not None:  # computed in it, from tensors outside
            of_the_graph |= {"cu_seqlens_q", "seqused_k"}
        # What vLLM's Triton call writes for rows that pad a batch nobody reads.
        self._pads_with_zeros = backend is FLASH

        def recorded(call: Any, *order: torch.Tensor, **given: Any) -> Any:
            if isinstance(given["block_table"], torch.Tensor):
                own = {**given, **dict(enumerate(order))}
                self.calls.append(
                    {
                        name: part.data_ptr() if isinstance(part, torch.Tensor) else part
                        for name, part in own.items()
                        if name not in of_the_graph
                    }
                )
            return call(given, *order) if order else call(**given)

        for place in CALLS[backend]:
            call = partial(recorded, getattr(*place))
            is_ordered = place == (any_order, "attend")
            of_all = (lambda given, *order, to=call: to(*order, **given)) if is_ordered else call
            patch.setattr(*place, of_all)
        self.captured = layers.build_for_capture(num_rows)

    def step(self, *rows: tuple[Request, int]) -> None:
        """Builds the step's metadata, as the runner does, and runs with the captured one."""
        common = self.layers.common(rows, self.num_rows)
        built = self.layers.build(rows, common)
        assert isinstance(built, Split)
        self.calls.clear()
        outputs = self.layers.forward(rows, common, self.captured)
        if self._pads_with_zeros:
            assert not any(output[len(rows) :].any() for output in outputs)
        self.layers.check(rows, outputs)


def test_vllms_function_calls_the_operator_as_its_stand_in_takes_it() -> None:
    """By position: so the names that we call it by are those that vLLM means."""
    operator = flash_attention.INTERFACE.flash_attn_varlen_func
    layers = make_layers(FLASH, "knorm", WIDE)
    long, short = layers.request(70, 75), layers.request(20, 25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attn, "flash_attn_varlen_func", operator)
        patch.setattr(any_order, "attend", pytest.fail)
        layers.builder.tables._any_order = False
        for num_long, num_short in ((70, 20), (1, 1), (2, 1)):
            layers.step((long, num_long), (short, num_short))


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("kernels", [WIDE, TABLES], ids=["references", "kernels"])
def test_heads_are_read_longest_first(
    graphs: bool, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = make_layers(FLASH, "adakv", kernels, graphs=graphs)
    orders, told = [], []
    attend = any_order.attend

    def noted(given: Any, sequences: torch.Tensor, num_queries: torch.Tensor) -> None:
        assert num_queries.tolist() == [1] * len(given["seqused_k"])
        orders.append((sequences[:-1].tolist(), given["seqused_k"].tolist()))
        told.append(given["scheduler_metadata"] is not None)
        attend(given, sequences, num_queries)

    monkeypatch.setattr(any_order, "attend", noted)
    long, short, other = (layers.request(n, n + 10) for n in (100, 20, 110))
    layers.step((long, 100), (other, 50))
    assert orders == []  # nobody has made a cut
    layers.step((long, 1), (other, 60))
    layers.step((short, 20), (long, 1), (other, 1))
    layers.step((short, 1), (other, 1), (long, 1))
    assert len(orders) == 3 * NUM_LAYERS
    assert told == [False] * 2 * NUM_LAYERS + [graphs] * NUM_LAYERS  # the last may be a graph
    for sequences, lengths in orders:
        assert sorted(sequences) == [*range(len(lengths))]
        assert lengths == sorted(lengths, reverse=True)
    assert any(sequences != sorted(sequences) for sequences, _ in orders)
    before = len(orders)
    layers.step((long, 2), (other, 1))  # one has several queries
    assert len(orders) == before


@pytest.mark.parametrize("reason", ["no operator", "other arguments", "other results", "sinks"])
def test_where_the_operator_is_not_what_we_know_heads_come_in_order(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = any_order.attend

    def other_arguments(*_: Any) -> None:
        raise RuntimeError("Unknown keyword argument")

    def other_results(given: Any, sequences: torch.Tensor, num_queries: torch.Tensor) -> None:
        attend(given, sequences.flip(0), num_queries)

    if reason == "no operator":
        monkeypatch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace())
    elif reason != "sinks":
        other = other_arguments if reason == "other arguments" else other_results
        monkeypatch.setattr(any_order, "attend", other)
    layers = make_layers(FLASH, "knorm", WIDE, graphs=True, with_sinks=reason == "sinks")
    monkeypatch.setattr(any_order, "attend", pytest.fail)
    long = layers.request(100, 110)
    layers.step((long, 100))
    layers.step((long, 1))


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_a_graph_of_a_decode_step_replays_for_other_rows_and_lengths(
    backend: Any, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = make_layers(backend, kernels=cuda.KERNELS, graphs=True, with_sinks=with_sinks)
    assert layers.builder.get_cudagraph_support(None, None) == (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    long, short, other = (layers.request(n, n + 40) for n in (100, 20, 94))
    replays = Replays(backend, layers, MAX_NUM_SEQS, monkeypatch)
    if backend is TRITON:
        assert layers.seq_lens.eq(1).all()  # as vLLM captures with this backend
    layers.step((long, 100), (short, 20))
    calls = []
    for rows in ([long, short], [short, long], [long], [short]):
        replays.step(*((request, 1) for request in rows))
        calls.append(list(replays.calls))
    layers.step((other, 94), (long, 1), (short, 1))
    for _ in range(3):  # one of them comes to its next block
        replays.step((short, 1), (other, 1), (long, 1))
    calls.append(list(replays.calls))
    assert all(call == calls[0] for call in calls)
    assert len(calls[0]) == NUM_LAYERS * (NUM_KV_HEADS if with_sinks else 1)
    # The same step outside the graph.
    layers.builder.largest_full_graph = 0
    layers.step((short, 1), (other, 1), (long, 1))


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_what_a_step_reads_is_filled_in_only_where_something_changed(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = make_layers(FLASH, "knorm", graphs=graphs, decode_budget=40, decode_interval=20)
    long, other = layers.request(100, 125), layers.request(94, 125)
    filled = Mock(wraps=tables.async_tensor_h2d)
    monkeypatch.setattr(tables, "async_tensor_h2d", filled)

    def fills(*rows: Request) -> int:
        before = filled.call_count
        layers.run(*((request, 1) for request in rows))
        return filled.call_count - before

    layers.run((long, 100), (other, 94))
    assert [fills(long, other) for _ in range(4)] == [1, 0, 0, 0]
    assert [fills(other, long), fills(other, long), fills(long), fills(long)] == [1, 0, 1, 0]
    layers.preempt(long)
    layers.run((long, 100), (other, 1))
    layers.run((long, 7), (other, 1))
    assert [fills(other, long), fills(other, long)] == [1, 0]
    made, num_filled = long.prompt.progress.num_made, 0
    while long.prompt.progress.num_made == made:  # until its round, of which other's is not far
        of_other = other.prompt.progress.num_made
        num_filled += fills(other, long) - (other.prompt.progress.num_made - of_other)
    assert num_filled == 1


def test_rows_are_looked_at_only_where_a_scorer_looks_through_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = Mock(wraps=DeviceSplitter._seen)
    monkeypatch.setattr(DeviceSplitter, "_seen", lambda *given: looked(*given))
    for method, num_steps in (("layer-probe", 0), ("snapkv", WINDOW)):
        layers = make_layers(FLASH, method, WIDE, graphs=True, decode_budget=40, decode_interval=20)
        request = layers.request(100, 130)
        layers.step((request, 100))
        looked.reset_mock()
        for _ in range(22):  # a round, with steps before those that it looks through
            layers.step((request, 1))
        assert looked.call_count == num_steps


def test_only_graphs_take_rows_without_a_cut_through_the_one_head_view(backend: Any) -> None:
    layers = make_layers(backend, graphs=True)
    short = layers.request(20, 30)
    assert isinstance(layers.step((short, 20)), STOCK[backend])
    assert isinstance(layers.step((short, 1)), Split)
    layers.builder.largest_full_graph = 0
    assert isinstance(layers.step((short, 1)), STOCK[backend])


def test_a_row_without_a_cut_ignores_what_was_packed_in_its_blocks_before(backend: Any) -> None:
    layers = make_layers(backend, graphs=True)
    long, short = layers.request(100, 110), layers.request(20, 30)
    layers.step((long, 100))
    layers.step((long, 1))
    cut = long.prompt.last_cut
    assert cut
    packed = long.blocks[cut.first_packed]
    layers.preempt(long)
    layers.free.remove(packed)
    layers.free.insert(0, packed)
    layers.step((short, 20))
    assert short.blocks[0] == packed
    layers.step((short, 1))


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("method", ["adakv-perturb", "layer-defensivekv"])
def test_neither_a_step_nor_a_cut_waits_for_the_device(
    method: str, backend: Any, with_sinks: bool
) -> None:
    layers = make_layers(backend, method, cuda.KERNELS, with_sinks=with_sinks)
    long, chunked = layers.request(100, 110), layers.request(90, 100)
    for rows in (
        ((long, 100), (chunked, 60)),
        ((long, 1), (chunked, 26)),
        ((long, 1), (chunked, 4)),
        ((chunked, 1), (long, 1)),
        ((chunked, 2), (long, 1)),
    ):
        common = layers.common(rows)
        layers.make_rounds(rows, unsynchronised)
        with unsynchronised(*layers.on_host):
            metadata = layers.builder.build(0, common)
        # Rows are put together outside: only what the impl does is on the device's path.
        outputs = layers.forward(rows, common, metadata, guard=unsynchronised)
        layers.check(rows, outputs)


class Allocations(TorchDispatchMode):
    """Counts the bytes of all memory that is taken meanwhile, whoever holds it."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, torch.UntypedStorage] = {}

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._kept.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for part in tree_leaves(made):
            if isinstance(part, torch.Tensor):
                storage = part.untyped_storage()
                self._kept[storage.data_ptr()] = storage
        return made


@pytest.mark.parametrize(
    ("num_seqs", "num_kv_heads", "num_layers", "max_model_len", "block_size"),
    [(1, 1, 1, 16, 16), (5, 3, 2, 100, 16), (8, 2, 30, 1000, 32), (64, 8, 3, 4097, 128)],
)
def test_what_is_reserved_for_the_tables_is_what_they_allocate(
    num_seqs: int, num_kv_heads: int, num_layers: int, max_model_len: int, block_size: int
) -> None:
    state = RetentionState(4, num_layers, num_kv_heads)
    with Allocations() as allocated:
        tables = HeadwiseTables(state, num_seqs, max_model_len, block_size, REFERENCES)
    assert tables.num_kv_heads == num_kv_heads
    reserved = buffer_bytes(num_seqs, num_kv_heads, num_layers, max_model_len, block_size)
    assert allocated.num_bytes == reserved


@pytest.mark.parametrize("any_order", [False, True], ids=["", "longest first"])
@pytest.mark.parametrize("num_rows", [1, 2, 4])
def test_every_layer_of_every_pass_gets_its_own_table(num_rows: int, any_order: bool) -> None:
    """As many at once as fit; a layer may come again, and a pass before the last one ended."""
    num_layers, num_heads, block_size = 3, 2, 4
    state = RetentionState(60, num_layers, num_heads)
    ends = torch.randint(9, (60, num_layers, num_heads)).sort(-1).values
    state.offsets[..., 1:] = ends  # up to eight of two packed blocks' pages in all layers
    tables = HeadwiseTables(state, 4, 40, block_size, REFERENCES, any_order)
    rows = SettledRows(
        torch.arange(1, 1 + 12 * num_rows, dtype=torch.int32).view(num_rows, 12),
        torch.full((num_rows,), 33, dtype=torch.int32),
        torch.full((num_rows,), 4, dtype=torch.int32),
        torch.full((num_rows,), 6, dtype=torch.int32),
        torch.arange(1, 1 + num_rows),
    )
    rows.offsets = state.offsets[rows.first_packed_blocks]
    everything = (slice(0, num_rows),)
    batch = HeadwiseBatch(everything[0], everything, rows.seq_lens, 1, 40, rows, None)
    for index, again in (
        *((0, False), (1, False), (0, True), (2, False), (1, True)),
        *((0, False), (1, False)),
        *((0, False), (1, False), (2, False)),
    ):
        if (index, again) == (0, False):
            rows.seq_lens += 1
        expected = rows.page_table(state, block_size)
        found = tables.of_layer(index, batch, again)
        order = [*range(num_rows * num_heads)]
        if any_order:
            assert batch.orders is not None
            order = batch.orders.sequences[index, :-1].tolist()
        assert sorted(order) == [*range(num_rows * num_heads)]
        for row, sequence in enumerate(order):
            length = int(expected.seq_lens[index, sequence])
            pages = slice(0, -(-length // block_size))
            assert int(found.seq_lens[row]) == length
            assert torch.equal(found.pages[row, pages], expected.pages[index, sequence, pages])


def test_two_stock_parts_of_a_step_do_not_share_one_schedule() -> None:
    """vLLM's builder has one buffer for it where there are full graphs; the stand-in looks."""
    sparse = {
        "prefill": "critiprefill",
        "prefill_segment": 32,
        "prefill_block": 16,
        "prefill_budget": 32,
        "prefill_dense_until": 32,
    }
    layers = make_layers(FLASH, "snapkv", graphs=True, **sparse)
    long, short = layers.request(170, 175), layers.request(20, 25)
    layers.run((short, 20))
    metadata = layers.run((long, 170), (short, 1))
    first, second = metadata.stock_parts
    assert first.metadata.num_actual_tokens != second.metadata.num_actual_tokens
    assert first.metadata.scheduler_metadata is not None


def test_flash_attention_4_gets_no_cache_that_it_may_not_address() -> None:
    pages = torch.empty(2**20, 16, 1, 256, device="meta")[..., :128]
    refuse_large_view(3, pages)
    refuse_large_view(4, pages[: 2**19])
    with pytest.raises(ConfigError, match=r"FlashAttention 4 .*choose --attention-backend TRITON"):
        refuse_large_view(4, pages)


def test_the_backends_ask_for_one_layout(backend: Any) -> None:
    assert backend.supported_kv_cache_layouts() == (KVCacheLayout.LBHNC,)
    ours = PLATFORMS["cuda"].backends[AttentionBackendEnum[backend.get_name()]]
    assert resolve_obj_by_qualname(ours) is backend


def test_no_model_leaves_keys_and_values_out_of_the_call(backend: Any) -> None:
    assert not backend.supports_kv_cache_update_bypass


def test_vllms_compiler_fuses_no_quantisation_into_outputs() -> None:
    impl = make_layers(TRITON).layers[0].impl
    stock = triton_attn.TritonAttentionImpl.fused_output_quant_supported
    assert stock(impl, kFp8StaticTensorSym)  # it would, with vLLM's own
    assert not impl.fused_output_quant_supported(kFp8StaticTensorSym)


@pytest.mark.parametrize(
    ("values", "reason"),
    [({"alibi_slopes": [0.5] * 4}, "ALiBi"), ({"logits_soft_cap": 30.0}, "a logits soft cap")],
)
def test_layers_that_the_one_head_view_cannot_express_are_refused(
    values: dict[str, Any], reason: str, backend: Any
) -> None:
    settings = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    impl = backend.get_impl_cls()
    with pytest.raises(ConfigError, match=reason):
        impl(4, HEAD_SIZE, 1.0, NUM_KV_HEADS, **{**settings, **values})


def test_a_layer_with_a_sliding_window_may_have_what_others_may_not(backend: Any) -> None:
    impl = backend.get_impl_cls()
    settings = {"alibi_slopes": None, "kv_cache_dtype": "auto", "logits_soft_cap": 30.0}
    assert impl(4, HEAD_SIZE, 1.0, NUM_KV_HEADS, sliding_window=64, **settings)


def warmed_up(
    method: str, references: Kernels = REFERENCES, **options: Any
) -> tuple[Layers, set[str], set[str]]:
    """Layers on which a warm-up left no trace, what it launched, and what is launched from then."""
    launched: set[str] = set()

    def noted(name: str, twin: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            launched.add(name)
            return twin(*args, **kwargs)

        return call

    # References in place of kernels: which are called is the same, and takes less time.
    kernels = Kernels(
        **{
            part.name: noted(part.name, getattr(references, part.name))
            for part in fields(Kernels)
            if part.name != "over_rows"
        }
    )
    layers = make_layers(FLASH, method, kernels, **options)
    warm_up(layers.builder, [method], layers.eviction)
    assert not layers.state.offsets.any()
    assert not layers.state.completed
    assert not any(layer.kv_cache[1:].any() for layer in layers.layers)
    warm, _ = set(launched), launched.clear()
    return layers, warm, launched


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("method", ["adakv-perturb", "layer-defensivekv", "knorm"])
def test_warming_up_launches_what_prompts_need_and_leaves_no_trace(
    method: str, graphs: bool
) -> None:
    layers, warm, launched = warmed_up(method, graphs=graphs)
    mixed_steps(layers)
    assert launched == warm
