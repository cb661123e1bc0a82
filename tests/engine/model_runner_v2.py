"""Layers whose batches come as model runner V2 hands them over: its own classes, without a device.

Its request and block tables, its batch, and the functions that make metadata of it, are vLLM's.
Only what they are filled with, which its Triton kernels compute, is computed here.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.cpu import buffer_utils as cpu_buffer_utils
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from tests.engine.cuda_layers import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    Layers,
    Request,
)
from vllm_kvselect.engine.cuda.worker import EvictionGPUWorker
from vllm_kvselect.engine.drop.request import LiveRequests
from vllm_kvselect.engine.drop.request import Request as LiveRequest
from vllm_kvselect.engine.notice import StepNotice

CPU = torch.device("cpu")
MAX_NUM_TOKENS = 256


class LayersOfV2(Layers):
    """The layers, their builder and our worker, with model runner V2 around them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:  # as vLLM's CPU worker does
            patch.setattr(buffer_utils, "UvaBuffer", cpu_buffer_utils.UvaBuffer)
            self.table = RequestState(MAX_NUM_SEQS, MAX_MODEL_LEN, MAX_NUM_TOKENS, 0, 100, CPU)
            sizes = MAX_NUM_SEQS, MAX_NUM_TOKENS, [MAX_MODEL_LEN // BLOCK_SIZE]
            self.tables = BlockTables([BLOCK_SIZE], *sizes, CPU)
        self.num_appended: dict[Request, int] = {}
        self.names: dict[Request, str] = {}
        super().__init__(*args, **kwargs)
        self.worker: Any = object.__new__(EvictionGPUWorker)
        self.worker.use_v2_model_runner = True
        self.worker.model_runner = SimpleNamespace(req_states=self.table, block_tables=self.tables)
        self.worker._group_id = 0
        self.worker._is_dummy, self.worker._row_ids = False, []
        self.worker._requests = LiveRequests(self.eviction, BLOCK_SIZE)
        self.buffers = InputBuffers(MAX_NUM_SEQS, MAX_NUM_TOKENS, CPU)
        self.template = InputBatch.make_dummy(1, 1, self.buffers)
        self.seq_lens = self.buffers.seq_lens
        spec, names = self.builder.kv_cache_spec, self.builder.layer_names
        self.group = AttentionGroup(self._backend, names, spec, 0)
        self.group.metadata_builders = [self.builder]
        self.cache_config = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(names, spec)])
        self.model_state: Any = SimpleNamespace(
            max_model_len=MAX_MODEL_LEN, supports_mm_inputs=False
        )

    def request(self, num_prompt_tokens: int, num_tokens: int) -> Request:
        """A request that will come to `num_tokens`, its prompt among them, known to the runner."""
        request = super().request(num_prompt_tokens, num_tokens)
        name = self.names[request] = f"r{len(self.names)}"
        self.worker._requests._requests[name] = request.prompt
        self._enter(request)
        return request

    def preempt(self, request: Request) -> None:
        """Takes a request's blocks and its place in the runner's table."""
        super().preempt(request)
        self.table.remove_request(self.names[request])
        self.num_appended.pop(request, None)
        self._enter(request)

    def _enter(self, request: Request) -> None:
        length = request.prompt.plan.num_prompt_tokens
        self.table.free_indices.reverse()  # so that rows and places differ
        self.table.add_request(self.names[request], length, [1] * length, 0, 20)

    def _requests_of(self, common: CommonAttentionMetadata) -> list[LiveRequest]:
        found: list[LiveRequest] = self.worker._requests_of(common)
        return found

    def _swap(self, request: Request) -> None:
        before = request.prompt.progress.swap
        super()._swap(request)
        if (swap := request.prompt.progress.swap) is not before:
            self.worker._swap_blocks(StepNotice(swaps={self.names[request]: swap}))

    def common(
        self, rows: Sequence[tuple[Request, int]], num_rows: int | None = None
    ) -> CommonAttentionMetadata:
        """The step's metadata, once the runner's own table is seen to hold the same blocks."""
        made = super().common(rows, num_rows)
        places = [self.table.req_id_to_index[self.names[request]] for request, _ in rows]
        for place, (request, _) in zip(places, rows, strict=True):
            known = self.num_appended.get(request, 0)
            self.tables.append_block_ids(place, (request.blocks[known:],), overwrite=not known)
            self.num_appended[request] = len(request.blocks)
        (table,) = self.tables.block_tables
        ends = table._staged_write_cu_lens
        where = zip(table._staged_write_indices, table._staged_write_starts, strict=True)
        for (place, first), begin, end in zip(where, [0, *ends], ends, strict=False):
            written = torch.tensor(table._staged_write_contents[begin:end], dtype=torch.int32)
            table.gpu[place, first : first + end - begin] = written
        table.clear_staged_writes()
        for place, (request, _) in zip(places, rows, strict=True):
            blocks = torch.tensor(request.blocks)
            held = blocks != 0  # others are not read
            assert table.gpu[place, : len(blocks)][held].tolist() == blocks[held].tolist()
        return made

    def build(self, rows: Sequence[tuple[Request, int]], common: CommonAttentionMetadata) -> Any:
        """What the runner has the builder make of a step."""
        self.make_rounds(rows)
        lens = np.array([num_new for _, num_new in rows], np.int32)
        computed = np.array([request.num_computed for request, _ in rows], np.int32)
        prompts = np.array([request.prompt.plan.num_prompt_tokens for request, _ in rows])
        names = self.worker._row_ids = [self.names[request] for request, _ in rows]
        places = np.array([self.table.req_id_to_index[name] for name in names])
        batch = replace(
            self.template,
            req_ids=names,
            num_reqs=len(rows),
            num_reqs_after_padding=common.num_reqs,
            idx_mapping=torch.from_numpy(places),
            idx_mapping_np=places,
            num_scheduled_tokens=lens,
            num_tokens=int(lens.sum()),
            num_tokens_after_padding=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            query_start_loc_np=common.query_start_loc_cpu.numpy(),
            seq_lens=common.seq_lens,
            seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound,
            num_computed_tokens_np=computed,
            is_prefilling_np=computed < prompts,
        )
        return self._prepare(batch, common, common.num_reqs > len(rows), for_capture=False)

    def build_for_capture(self, num_rows: int) -> Any:
        """What the runner has the builder make of a graph's dummy step."""
        common = self.common((), num_rows)
        batch = InputBatch.make_dummy(num_rows, num_rows, self.buffers)
        return self._prepare(batch, common, is_full_graph=True, for_capture=True)

    def _prepare(
        self,
        batch: InputBatch,
        common: CommonAttentionMetadata,
        is_full_graph: bool,
        for_capture: bool,
    ) -> Any:
        by_layer = DefaultModelState.prepare_attn(
            self.model_state,
            batch,
            CUDAGraphMode.FULL if is_full_graph else CUDAGraphMode.NONE,
            (common.block_table_tensor,),
            common.slot_mapping[None],
            [[self.group]],
            self.cache_config,
            for_capture=for_capture,
        )
        first, *others = by_layer.values()
        assert all(other is first for other in others)
        return first
