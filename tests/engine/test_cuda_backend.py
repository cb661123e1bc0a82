"""The CUDA backend on CPU tensors: vLLM's builder and impl, Triton's interpreter, stock stand-ins.

Every step's outputs are those of the float64 oracle, which knows what each head retained.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheLayout

from tests.engine import flash_attention
from tests.engine.cuda_layers import (
    BLOCK_SIZE,
    HEAD_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    Layers,
    Request,
    vllm_config,
)
from tests.kernels.unsynchronised import unsynchronised
from vllm_kvselect.config import ConfigError, EvictionConfig
from vllm_kvselect.engine.cuda_backend import HeadwiseFlashAttentionBackend
from vllm_kvselect.engine.cuda_tables import buffer_bytes
from vllm_kvselect.engine.headwise import HeadwiseMetadata
from vllm_kvselect.engine.warm_up import warm_up
from vllm_kvselect.methods import METHODS, NO_TWINS
from vllm_kvselect.scoring.value_norms import value_norms

pytest.importorskip("triton")
from vllm_kvselect.kernels import cuda

WINDOW, BUDGET = 8, 48


def eviction(method: str = "adakv-perturb", **values: Any) -> EvictionConfig:
    return EvictionConfig.parse({"method": method, "window": WINDOW, "budget": BUDGET, **values})


@pytest.fixture(autouse=True)
def stand_ins() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        flash_attention.install(patch)
        yield


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return vllm_config()


@pytest.fixture
def layers(config: VllmConfig) -> Layers:
    config.compilation_config.static_forward_context.clear()
    return Layers(eviction(), NO_TWINS, config)


def mixed_steps(layers: Layers, past_prompts: bool = True) -> list[Request]:
    """Prefill, chunks, completions, decodes, all in each other's company and in changing order."""
    long, short, chunked = (
        layers.request(num_prompt, num_prompt + 20) for num_prompt in (100, 20, 90)
    )
    assert long.prompt.plan
    assert short.prompt.plan is None
    layers.step((long, 100), (short, 20))
    layers.step((long, 1), (short, 1))
    layers.step((long, 1), (short, 1), (chunked, 60))
    layers.step((short, 1), (long, 1), (chunked, 26))  # ends inside the window
    layers.step((long, 1), (chunked, 4))
    layers.step((chunked, 1), (short, 1), (long, 1))
    layers.step((long, 3), (chunked, 1), (short, 2))
    layers.preempt(long)
    layers.step((chunked, 1), (long, 70))
    # The chunk runs past the prompt's end.
    layers.step((chunked, 1), *([(long, 36)] if past_prompts else [(long, 30)]))
    layers.step((long, 1), (chunked, 1), (short, 1))
    return [long, short, chunked]


@pytest.mark.parametrize("method", ["adakv-perturb", "layer-defensivekv"])
def test_every_step_is_that_of_the_oracle_with_the_kernels(method: str, config: VllmConfig) -> None:
    config.compilation_config.static_forward_context.clear()
    layers = Layers(eviction(method), cuda.TWINS, config)
    mixed_steps(layers, past_prompts=not METHODS[method].pooled)


@pytest.mark.parametrize("method", METHODS)
def test_every_step_is_that_of_the_oracle(method: str, config: VllmConfig) -> None:
    config.compilation_config.static_forward_context.clear()
    # The reference rounds norms to bfloat16, enough to change what is retained.
    layers = Layers(eviction(method), {value_norms: cuda.value_norms}, config)
    mixed_steps(layers, past_prompts=not METHODS[method].pooled)


def test_a_batch_that_drops_nothing_is_stock(layers: Layers) -> None:
    short = layers.request(20, 25)
    for num_new in (12, 8, 1):
        assert isinstance(layers.step((short, num_new)), FlashAttentionMetadata)


def test_rows_without_a_plan_keep_vllms_call_beside_rows_with_one(layers: Layers) -> None:
    long, short = layers.request(100, 110), layers.request(20, 30)
    stock = layers.step((long, 100), (short, 20))
    assert isinstance(stock, HeadwiseMetadata)
    assert stock.split.stock_tokens is None  # all of the batch, untouched
    mixed = layers.step((long, 2), (short, 1))
    assert mixed.stock.num_actual_tokens == 1
    assert mixed.split.headwise.max_query_len == 2


def test_an_fp8_cache_is_scored_and_moved_as_attention_reads_it() -> None:
    layers = Layers(eviction(), cuda.TWINS, vllm_config("fp8"))
    assert layers.layers[0].impl._score_scale == HEAD_SIZE**-0.5 * 0.25 * 0.5
    mixed_steps(layers)


def test_an_fp8_cache_with_scales_per_head_is_refused() -> None:
    layers = Layers(eviction(), NO_TWINS, vllm_config("fp8"))
    layer = layers.layers[0]
    layer._k_scale = torch.ones(NUM_KV_HEADS)
    with pytest.raises(ConfigError, match=r"scales per head.*--kv-cache-dtype bfloat16"):
        layer.impl.start(0, layer, layers.state, layers.builder.tables, torch.bfloat16, {})


class Replays:
    """A decode step captured once, for more rows than there are, and what its calls were given."""

    def __init__(self, layers: Layers, num_rows: int, patch: pytest.MonkeyPatch) -> None:
        self.layers, self.num_rows, self.calls = layers, num_rows, []
        call = flash_attn.flash_attn_varlen_func

        def recorded(**given: Any) -> Any:
            if isinstance(given["block_table"], torch.Tensor):
                self.calls.append(
                    {
                        name: part.data_ptr() if isinstance(part, torch.Tensor) else part
                        for name, part in given.items()
                        if name not in ("q", "out")  # of the graph's own memory
                    }
                )
            return call(**given)

        patch.setattr(flash_attn, "flash_attn_varlen_func", recorded)
        common = layers.common((), num_rows)
        common.max_seq_len = MAX_MODEL_LEN
        self.captured = layers.builder.build_for_cudagraph_capture(common)

    def step(self, *rows: tuple[Request, int]) -> None:
        """Builds the step's metadata, as the runner does, and runs with the captured one."""
        common = self.layers.common(rows, self.num_rows)
        built = self.layers.builder.build(0, common)
        assert isinstance(built, HeadwiseMetadata)
        self.calls.clear()
        outputs = self.layers.forward(rows, common, self.captured)
        assert all(torch.equal(output[len(rows) :], output[len(rows) :] * 0) for output in outputs)
        self.layers.check(rows, outputs)


def test_a_graph_of_a_decode_step_replays_for_other_rows_and_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = Layers(eviction(), cuda.TWINS, vllm_config(graphs=True))
    assert layers.builder.get_cudagraph_support(None, None) == (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    long, short, other = (layers.request(n, n + 40) for n in (100, 20, 90))
    replays = Replays(layers, MAX_NUM_SEQS, monkeypatch)
    layers.step((long, 100), (short, 20))
    calls = []
    for rows in ([long, short], [short, long], [long], [short]):
        replays.step(*((request, 1) for request in rows))
        calls.append(list(replays.calls))
    layers.step((other, 90), (long, 1), (short, 1))
    for _ in range(BLOCK_SIZE + 1):  # into the next block
        replays.step((short, 1), (other, 1), (long, 1))
    calls.append(list(replays.calls))
    assert all(call == calls[0] for call in calls)
    assert len(calls[0]) == NUM_LAYERS
    # The same step outside the graph.
    layers.builder.use_full_cuda_graph = False
    layers.step((short, 1), (other, 1), (long, 1))


def test_only_graphs_take_rows_without_a_plan_through_the_one_head_view() -> None:
    layers = Layers(eviction(), NO_TWINS, vllm_config(graphs=True))
    short = layers.request(20, 30)
    assert isinstance(layers.step((short, 20)), FlashAttentionMetadata)
    assert isinstance(layers.step((short, 1)), HeadwiseMetadata)
    layers.builder.max_cudagraph_size = 0
    assert isinstance(layers.step((short, 1)), FlashAttentionMetadata)


def test_a_row_without_a_plan_ignores_what_was_packed_in_its_blocks_before() -> None:
    layers = Layers(eviction(), NO_TWINS, vllm_config(graphs=True))
    long, short = layers.request(100, 110), layers.request(20, 30)
    layers.step((long, 100))
    assert long.prompt.plan
    packed = long.blocks[long.prompt.plan.first_packed]
    layers.preempt(long)
    layers.free.remove(packed)
    layers.free.insert(0, packed)
    layers.step((short, 20))
    assert short.blocks[0] == packed
    layers.step((short, 1))


def test_a_single_token_of_a_prompt_that_drops_entries_is_no_decode() -> None:
    layers = Layers(eviction(), NO_TWINS, vllm_config(graphs=True))
    long, short = layers.request(100, 110), layers.request(20, 30)
    layers.step((long, 99), (short, 20))
    metadata = layers.step((long, 1), (short, 1))
    assert len(metadata.split.completions) == 1
    layers.step((long, 1), (short, 1))


@pytest.mark.parametrize("method", ["adakv-perturb", "layer-defensivekv"])
def test_neither_a_decode_step_nor_a_completion_waits_for_the_device(
    method: str, config: VllmConfig
) -> None:
    config.compilation_config.static_forward_context.clear()
    layers = Layers(eviction(method), cuda.TWINS, config)
    long, chunked = layers.request(100, 110), layers.request(90, 100)
    for rows in (
        ((long, 100), (chunked, 60)),
        ((long, 1), (chunked, 26)),
        ((long, 1), (chunked, 4)),
        ((chunked, 1), (long, 1)),
        ((chunked, 2), (long, 1)),
    ):
        common = layers.common(rows)
        with unsynchronised(*layers.on_host):
            metadata = layers.builder.build(0, common)
        # Rows are put together outside: only what the impl does is on the device's path.
        outputs = layers.forward(rows, common, metadata, guard=unsynchronised)
        layers.check(rows, outputs)


def test_the_buffers_take_what_their_formula_says(layers: Layers) -> None:
    tables = layers.builder.tables
    held = [part for part in vars(tables).values() if isinstance(part, torch.Tensor)]
    size = MAX_NUM_SEQS, NUM_KV_HEADS, NUM_LAYERS, MAX_MODEL_LEN, BLOCK_SIZE
    assert buffer_bytes(*size) == sum(part.nbytes for part in held)


def test_the_backend_asks_for_one_layout() -> None:
    assert HeadwiseFlashAttentionBackend.supported_kv_cache_layouts() == (KVCacheLayout.LBHNC,)
    assert HeadwiseFlashAttentionBackend.get_name() == "FLASH_ATTN"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"alibi_slopes": [0.5] * 4}, "ALiBi"),
        ({"sliding_window": 64}, "a sliding window"),
        ({"logits_soft_cap": 30.0}, "a logits soft cap"),
        ({"kv_sharing_target_layer_name": "x"}, "a KV cache shared between layers"),
        ({"sinks": torch.zeros(4)}, "attention sinks"),
    ],
)
def test_layers_that_the_one_head_view_cannot_express_are_refused(
    values: dict[str, Any], reason: str
) -> None:
    settings = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    impl = HeadwiseFlashAttentionBackend.get_impl_cls()
    with pytest.raises(ConfigError, match=reason):
        impl(4, HEAD_SIZE, 1.0, NUM_KV_HEADS, **{**settings, **values})


@pytest.mark.parametrize("method", ["adakv-perturb", "layer-defensivekv", "h2o"])
def test_warming_up_launches_what_prompts_need_and_leaves_no_trace(
    method: str, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.compilation_config.static_forward_context.clear()
    launched: set[str] = set()

    def noted(name: str, twin: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            launched.add(name)
            return twin(*args, **kwargs)

        return call

    # References in place of kernels: which are called is the same, and takes less time.
    twins = {part: noted(part.__name__, part) for part in cuda.TWINS}
    layers = Layers(eviction(method), twins, config)
    warm_up(layers.builder, [method], layers.eviction)
    assert not layers.state.offsets.any()
    assert not layers.state.completed
    assert not any(layer.kv_cache[1:].any() for layer in layers.layers)
    warm, _ = set(launched), launched.clear()
    mixed_steps(layers, past_prompts=False)
    assert launched == warm
