"""A few attention layers with the CUDA backend on random tensors, and what they must compute.

Batches are made as vLLM's model runners make them. Expected outputs come from the brute-force
oracle in float64, which says what every head retains; blocks given back are overwritten.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata

from tests.engine.cuda_requests import (
    BLOCK_SIZE,
    GROUP,
    HEAD_SIZE,
    HIDDEN_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    SCALE,
    SCALES,
    Request,
)
from tests.engine.flash_attention import FP8, PADDING, attention
from tests.kernels import interpreter
from tests.plans import planned
from tests.strategies import random_probe
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.cuda.flash_attention import HeadwiseFlashAttentionBackend
from vllm_kvselect.engine.drop.request import Request as LiveRequest
from vllm_kvselect.engine.notice import Swap
from vllm_kvselect.engine.scheduler.spec import HeadwiseSpec
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.planning.plan import Plan
from vllm_kvselect.scoring import value_norms
from vllm_kvselect.scoring.value_norms import OutputProjection
from vllm_kvselect.selecting import pruning
from vllm_kvselect.tiny_model import tiny_model

interpreter.quicken()


def projected_value_norms(value: torch.Tensor, projection: OutputProjection) -> torch.Tensor:
    """The reference, in float32."""
    return value_norms.value_norms(value.float(), projection.weight.float())


def select_pruned(
    scores: torch.Tensor,
    weights: torch.Tensor,
    value: torch.Tensor,
    projection: OutputProjection,
    *rest: Any,
) -> torch.Tensor:
    """The reference, in float32."""
    wide = OutputProjection.of(projection.weight.float())
    return pruning.select_pruned(scores, weights, value.float(), wide, *rest)


WIDE = Kernels(projected_value_norms=projected_value_norms, select_pruned=select_pruned)
"""References for bfloat16, to which they round norms: enough to change what is retained."""


def vllm_config(
    kv_cache_dtype: str = "auto", graphs: bool = False, dtype: str = "bfloat16"
) -> VllmConfig:
    settings = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS}
    args = EngineArgs(str(tiny_model()), dtype=dtype, block_size=BLOCK_SIZE, **settings)
    config = args.create_engine_config()
    config.cache_config.cache_dtype = kv_cache_dtype
    if graphs:
        config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        config.compilation_config.max_cudagraph_capture_size = MAX_NUM_SEQS
        config.compilation_config.cudagraph_capture_sizes = [1, 2, MAX_NUM_SEQS]
    return config


class Layers:
    """The layers of a small model on one device, with their builder.

    Args:
        eviction: The configuration.
        kernels: What computes the parts of a choice.
        config: vLLM's.
        backend: The backend of the layers.
        with_sinks: Whether they have attention sinks.
        device: Where they are.

    Attributes:
        atol: What an output may be off beside its own rounding.
    """

    atol = 1e-6

    def __init__(
        self,
        eviction: EvictionConfig,
        kernels: Kernels,
        config: VllmConfig,
        backend: Any = HeadwiseFlashAttentionBackend,
        with_sinks: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.eviction, self._backend, self._with_sinks = eviction, backend, with_sinks
        self.device = torch.device(device)
        self.quantized = config.cache_config.cache_dtype == "fp8"
        self.random = torch.Generator().manual_seed(1)
        self.dtype = config.model_config.dtype
        dtype = torch.uint8 if self.quantized else self.dtype
        shape = (NUM_LAYERS * NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
        memory = torch.zeros(shape, dtype=dtype, device=self.device)
        names = [f"layers.{index}.attn" for index in range(NUM_LAYERS)]
        config.compilation_config.static_forward_context.clear()  # layers made before
        with set_current_vllm_config(config):
            self.layers = [self._layer(name, config) for name in names]
            for layer, cache in zip(self.layers, memory.chunk(NUM_LAYERS), strict=True):
                layer.kv_cache = cache
            spec = HeadwiseSpec(
                block_size=BLOCK_SIZE,
                num_kv_heads=NUM_KV_HEADS,
                head_size=HEAD_SIZE,
                dtype=dtype,
                eviction=eviction,
            )
            self.builder = backend.get_builder_cls()(spec, names, config, self.device)
        self.prompts: list[LiveRequest] = []
        self.state = self.builder.start(self._requests_of, kernels, keeps_numbers=True)
        integers = {"dtype": torch.int32, "device": self.device}
        self.block_table = torch.zeros(MAX_NUM_SEQS, MAX_MODEL_LEN // BLOCK_SIZE, **integers)
        self.seq_lens = torch.zeros(MAX_NUM_SEQS, **integers)
        self.free = [*range(1, NUM_BLOCKS)]
        self.on_host: list[torch.Tensor] = []

    def _layer(self, name: str, config: VllmConfig) -> Attention:
        sinks = {"sinks": 2 * self._randn(GROUP * NUM_KV_HEADS)} if self._with_sinks else {}
        layer = Attention(
            GROUP * NUM_KV_HEADS,
            HEAD_SIZE,
            SCALE,
            NUM_KV_HEADS,
            cache_config=config.cache_config,
            prefix=name,
            attn_backend=self._backend,
            **sinks,
        )
        if self.quantized:
            for part, scale in SCALES.items():
                getattr(layer, f"_{part}_scale").fill_(scale)
                setattr(layer, f"_{part}_scale_float", scale)
        weight = self._randn(NUM_KV_HEADS, HEAD_SIZE, GROUP, HIDDEN_SIZE)
        layer.impl.output_projection = OutputProjection.of(weight)
        probe = random_probe(NUM_KV_HEADS, HEAD_SIZE, seed=len(name))
        layer.impl.probe = probe.to(self.device)
        return layer

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.device, self.dtype)

    def _requests_of(self, common: CommonAttentionMetadata) -> list[LiveRequest]:
        nothing = LiveRequest(Plan(0, self.eviction))
        return self.prompts + [nothing] * (common.num_reqs - len(self.prompts))

    def request(self, num_prompt_tokens: int, num_tokens: int) -> Request:
        """A request that will come to `num_tokens`, its prompt among them."""
        tensors = {
            "q": self._randn(NUM_LAYERS, num_tokens, GROUP * NUM_KV_HEADS, HEAD_SIZE),
            "k": self._randn(NUM_LAYERS, num_tokens, NUM_KV_HEADS, HEAD_SIZE),
            "v": self._randn(NUM_LAYERS, num_tokens, NUM_KV_HEADS, HEAD_SIZE),
        }
        # Some keys are close to what queries look for, so that heads differ in what they need.
        tensors["k"][:, ::7] *= 2
        read = {name: tensor.double() for name, tensor in tensors.items()}
        if self.quantized:
            codes = {name: (t.float() / SCALES[name]).to(FP8) for name, t in tensors.items()}
            read = {name: code.double() * SCALES[name] for name, code in codes.items()}
            if self.layers[0].query_quant is None:
                read["q"] = tensors["q"].double()
            else:
                tensors["q"] = codes["q"]
        sizes = (num_prompt_tokens, BLOCK_SIZE, self.eviction, num_tokens - num_prompt_tokens)
        prompt = LiveRequest(planned(*sizes))
        return Request(*tensors.values(), read, prompt)

    def preempt(self, request: Request) -> None:
        """Takes a request's blocks, as the scheduler does."""
        held = [block for block in request.blocks if block]
        self._overwrite(held)
        self.free = held + self.free
        request.blocks, request.num_computed = [], 0
        request.prompt.pause()

    def _swap(self, request: Request) -> None:
        """Gives the blocks of a due cut back, and takes fresh ones, as the scheduler does."""
        cut, progress = request.prompt.due_cut, request.prompt.progress
        places = None if cut is None else slice(cut.first_packed, cut.tail_start)
        if cut is None or request.blocks[places] == progress.swap.fresh:
            return
        fresh = [self.free.pop(0) for _ in range(cut.num_packed)]
        progress.swap = Swap(request.blocks[: -(-cut.position // BLOCK_SIZE)], fresh)
        request.given_back = [block for block in request.blocks[: cut.tail_start] if block]
        request.blocks[: cut.tail_start] = [0] * cut.first_packed + fresh

    def _overwrite(self, blocks: Sequence[int]) -> None:
        for layer in self.layers:
            layer.kv_cache[blocks] = 77

    def common(
        self, rows: Sequence[tuple[Request, int]], num_rows: int | None = None
    ) -> CommonAttentionMetadata:
        """The step's metadata, padded to `num_rows`; tensors on the device are always the same."""
        num_rows = num_rows or len(rows)
        lens = np.zeros(num_rows, dtype=np.int64)
        ends = np.zeros(num_rows, dtype=np.int32)
        self.block_table.zero_()
        self.seq_lens.zero_()
        slots = []
        for row, (request, num_new) in enumerate(rows):
            end = request.num_computed + num_new
            request.prompt.come_to(request.num_computed)  # as the scheduler says
            self._swap(request)
            while len(request.blocks) * BLOCK_SIZE < end:
                request.blocks.append(self.free.pop(0))
            self.block_table[row, : len(request.blocks)] = torch.tensor(request.blocks)
            self.seq_lens[row], ends[row], lens[row] = end, end, num_new
            positions = torch.arange(request.num_computed, end)
            blocks = torch.tensor(request.blocks)[positions // BLOCK_SIZE]
            slots.append(blocks * BLOCK_SIZE + positions % BLOCK_SIZE)
        self.prompts = [request.prompt for request, _ in rows]
        starts = torch.from_numpy(np.concatenate(([0], lens.cumsum())).astype(np.int32))
        # With speculation the host knows an upper bound of what a decoding row has come to.
        bounds = torch.from_numpy(ends)
        for row, (request, num_new) in enumerate(rows):
            # (Rounds are not made beside drafters that run ahead.)
            is_past_prompt = request.num_computed >= request.prompt.plan.num_prompt_tokens
            if is_past_prompt and not self.eviction.decode_budget:
                bounds[row] += num_new - 1
        num_tokens = max(int(starts[-1]), num_rows if num_rows > len(rows) else 0)
        slot_mapping = torch.full((num_tokens,), PADDING)
        slot_mapping[: int(starts[-1])] = torch.cat(slots) if slots else torch.empty(0)
        self.on_host = [starts, bounds]
        return CommonAttentionMetadata(
            query_start_loc=starts.clone().to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=self.seq_lens[:num_rows],
            seq_lens_cpu_upper_bound=bounds,
            num_reqs=num_rows,
            num_actual_tokens=num_tokens,
            max_query_len=int(lens.max()) if rows else 1,
            max_seq_len=int(bounds.max()),
            block_table_tensor=self.block_table[:num_rows],
            slot_mapping=slot_mapping.to(self.device),
        )

    def forward(
        self,
        rows: Sequence[tuple[Request, int]],
        common: CommonAttentionMetadata,
        metadata: Any,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[torch.Tensor]:
        """Runs the layers on given metadata; their outputs `[num_tokens, num_heads, head_size]`.

        What an impl does, which happens on the device, runs under `guard`.
        """
        outputs = []
        for index, layer in enumerate(self.layers):
            query, key, value = self._given(index, rows, common.num_actual_tokens)
            shape = len(query), GROUP * NUM_KV_HEADS, HEAD_SIZE
            output = torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)
            cache = layer.kv_cache
            with guard():
                layer.impl.do_kv_cache_update(layer, key, value, cache, common.slot_mapping)
                layer.impl.forward(layer, query, key, value, cache, metadata, output)
            outputs.append(output)
        return outputs

    def _given(
        self, index: int, rows: Sequence[tuple[Request, int]], num_tokens: int
    ) -> Iterator[torch.Tensor]:
        """What a layer is called with: slices of the fused projection, rows apart from each other.

        They are `[num_tokens, num_heads, head_size]` each, padding included.
        """
        for name in ("query", "key", "value"):
            part = torch.cat(
                [
                    getattr(request, name)[index, request.num_computed :][:num_new]
                    for request, num_new in rows
                ]
            )
            padding = (0, 0, 0, 0, 0, num_tokens - len(part))
            padded = torch.nn.functional.pad(part.view(torch.int8), padding)
            yield padded.repeat(1, 2, 1).view(part.dtype)[:, : part.shape[1]]

    def served(self, num_prompt_tokens: int, num_tokens: int, eviction: EvictionConfig) -> Request:
        """A request with a configuration of its own, for steps that no oracle judges."""
        tensors = (
            self._randn(NUM_LAYERS, num_tokens, heads * NUM_KV_HEADS, HEAD_SIZE)
            for heads in (GROUP, 1, 1)
        )
        sizes = (num_prompt_tokens, BLOCK_SIZE, eviction, num_tokens - num_prompt_tokens)
        return Request(*tensors, {}, LiveRequest(planned(*sizes)))

    def run(self, *rows: tuple[Request, int]) -> Any:
        """One step, which no oracle judges; returns the metadata that it ran with."""
        common = self.common(rows)
        metadata = self.build(rows, common)
        self.forward(rows, common, metadata)
        for request, num_new in rows:
            request.num_computed += num_new
        return metadata

    def release(self, request: Request) -> None:
        """Takes the blocks of a request that has ended."""
        self.free += [block for block in request.blocks if block]
        request.blocks = []

    def step(self, *rows: tuple[Request, int]) -> Any:
        """One step, compared with the oracle; returns the metadata that it ran with."""
        common = self.common(rows)
        metadata = self.build(rows, common)
        self.check(rows, self.forward(rows, common, metadata))
        return metadata

    def build(self, rows: Sequence[tuple[Request, int]], common: CommonAttentionMetadata) -> Any:
        """Builds a step's metadata, before which rounds are made."""
        self.make_rounds(rows)
        return self.builder.build(0, common)

    def make_rounds(
        self,
        rows: Sequence[tuple[Request, int]],
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Makes the rounds that are due; others take what they free in the same step."""
        self.builder.take_queries()
        due = [request for request, _ in rows if request.prompt.due_cut is not None]
        with guard():
            self.builder.due.make([request.prompt for request in due])
        for request in due:
            self._overwrite(request.given_back)
            self.free += request.given_back

    def build_for_capture(self, num_rows: int) -> Any:
        """What the builder makes of the metadata that a graph is captured with."""
        common = self.common((), num_rows)
        common.max_seq_len = MAX_MODEL_LEN
        return self.builder.build_for_cudagraph_capture(common)

    def check(self, rows: Sequence[tuple[Request, int]], outputs: Sequence[torch.Tensor]) -> None:
        """Compares a step's outputs, then takes it as done."""
        for index, output in enumerate(outputs):
            first = 0
            for request, num_new in rows:
                request.come_to(request.num_computed + num_new, self.layers)
                expected = self._expected(request, index, num_new)
                # Rounded once, of which the oracle knows nothing.
                torch.testing.assert_close(
                    output[first : first + num_new].double(), expected, rtol=2**-8, atol=self.atol
                )
                first += num_new
        for request, num_new in rows:
            request.num_computed += num_new

    def _expected(self, request: Request, layer: int, num_new: int) -> torch.Tensor:
        read, outputs = {name: part[layer] for name, part in request.read.items()}, []
        sinks = self.layers[layer].impl.sinks
        for position in range(request.num_computed, request.num_computed + num_new):
            heads = []
            for head in range(NUM_KV_HEADS):
                seen = request.seen(layer, head, position)
                group = slice(head * GROUP, (head + 1) * GROUP)
                query, own = (
                    read["q"][position, None, group],
                    sinks if sinks is None else sinks[group],
                )
                key, value = (read[name][seen, head, None] for name in ("k", "v"))
                heads.append(attention(query, key, value, SCALE, sinks=own)[0])
            outputs.append(torch.cat(heads))
        return torch.stack(outputs)
