"""What the CUDA backends' builders have in common: FlashAttention's and Triton's are put behind.

Nothing here waits for the device. What is cut where is decided from what the host knows: prompts,
their cuts, and lengths that are exact while a prompt is not complete.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout, KVCacheSpec

from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.cuda.graph_queries import GraphQueries
from vllm_kvselect.engine.cuda.tables import HeadwiseTables
from vllm_kvselect.engine.drop.request import Request, RequestsOf
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.engine.scheduler.spec import HeadwiseSpec
from vllm_kvselect.engine.step.builder import HeadwiseBuilder
from vllm_kvselect.engine.step.split import (
    NEVER,
    Decodes,
    DraftSplitter,
    Seen,
    Sees,
    Split,
    Splitter,
)
from vllm_kvselect.engine.view.page_tables import SettledRows
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.paging.order import Sharing
from vllm_kvselect.paging.page_table import PageTable


class CudaBackend(AttentionBackend):
    """What a backend with the one-head view asks of the KV cache; put in front of vLLM's own.

    Attributes:
        supports_kv_cache_update_bypass: Whether a model that has written keys and values itself may
            leave them out of the call. Scoring needs them. vLLM asks from 0.33 on.
    """

    supports_kv_cache_update_bypass = False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """The layout in which the part of a block that holds one head is contiguous."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, kv_cache_spec: KVCacheSpec | None = None
    ) -> list[int | MultipleOf]:
        """The size of a page, where blocks have several: vLLM splits them into kernel blocks."""
        if isinstance(kv_cache_spec, HeadwiseSpec) and kv_cache_spec.page_size is not None:
            return [kv_cache_spec.page_size]
        return super().get_supported_kernel_block_sizes(kv_cache_spec)


class DeviceSplitter(Splitter):
    """Splits batches whose block tables and lengths are on a device."""

    _decodes: Decodes | None = None
    _seen_from = NEVER

    def decodes(self, common: CommonAttentionMetadata) -> Decodes | None:
        """The rows of a batch of one token a row, as before while they are; None for another."""
        if common.max_query_len != 1:
            return None
        requests, version = self._requests_of(common), self._state.version
        serials = [request.progress.serial for request in requests]
        held = self._decodes
        if held is None or held.version != version or held.serials != serials:
            self._decodes = Decodes.of(requests, version)
            self._seen_from = int(self._decodes.seen_from.min(initial=NEVER))
        return self._decodes

    def seen(self, decodes: Decodes, common: CommonAttentionMetadata) -> Seen | None:
        """The tokens of rows whose queries the next cuts of their requests look through."""
        if common.max_seq_len <= self._seen_from:
            return None
        if not (self._seq_lens(common).numpy() > decodes.seen_from).any():
            return None
        requests = self._requests_of(common)
        return self._seen(self._rows(common, requests), requests)

    def _seq_lens(self, common: CommonAttentionMetadata) -> torch.Tensor:
        # The lengths themselves: only drafters that run ahead of the host, which are refused, make
        # them less.
        bound = common.seq_lens_cpu_upper_bound
        assert bound is not None
        return bound

    def _table_of(self, rows: SettledRows) -> PageTable | None:
        rows.offsets = self._state.offsets.index_select(0, rows.first_packed_blocks)
        return None


class DeviceDraftSplitter(DraftSplitter, DeviceSplitter):
    """Splits a drafter's."""


class CudaMetadataBuilder(HeadwiseBuilder):
    """Builds vLLM's metadata, split where requests read what is retained. Stock until `start`.

    A graph that holds a whole decode step cannot choose between vLLM's call and the one-head view,
    so it always holds the view; rows that drop nothing have identity tables there.

    Attributes:
        tables: Page tables of the group's layers, once started.
        largest_full_graph: Tokens of the largest step that a graph of its own may hold.
        graph_queries: Where such a graph leaves its queries, if requests may make rounds.
    """

    block_size: int
    tables: HeadwiseTables
    largest_full_graph: int = 0
    graph_queries: GraphQueries | None = None
    splitter_class = DeviceSplitter
    draft_splitter_class = DeviceDraftSplitter
    supports_update_block_table = False

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Whole graphs for one token a row; mixed batches are split, outside graphs."""
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def _start_layers(
        self, layers: list[tuple[int, Any]], state: RetentionState, kernels: Kernels
    ) -> None:
        spec = self.kv_cache_spec
        assert isinstance(spec, HeadwiseSpec)
        expected = spec.page_size or self.vllm_config.cache_config.block_size
        if self.block_size != expected:
            raise ConfigError(
                f"kv_eviction cannot use block_size = {expected}, since the attention kernel takes "
                f"{self.block_size}; set --block-size {self.block_size}"
            )
        compilation = self.vllm_config.compilation_config
        if compilation.cudagraph_mode.has_full_cudagraphs():
            self.largest_full_graph = compilation.max_cudagraph_capture_size or 0
        of_trial: tuple[bool, Sharing | None] = (False, None)
        if spec.eviction.decode_attention == "backend":
            of_trial = self._any_order([layer for _, layer in layers], kernels)
        self.tables = HeadwiseTables(
            state,
            self.vllm_config.scheduler_config.max_num_seqs,
            self.vllm_config.model_config.max_model_len,
            self.block_size,
            kernels,
            *of_trial,
        )
        dtype = self.vllm_config.model_config.dtype
        if self.largest_full_graph and spec.eviction.may_drop_again:
            num_rows = min(self.largest_full_graph, self.vllm_config.scheduler_config.max_num_seqs)
            sizes = (state.num_layers, num_rows, self.layers[0].num_heads, spec.head_size)
            self.graph_queries = GraphQueries(*sizes, dtype, self.device)
        for index, layer in layers:
            layer.impl.start(index, layer, state, self.tables, dtype, kernels)
            if spec.eviction.decode_attention == "xformers":
                layer.impl.take_xformers()

    def draft_for(self, target: HeadwiseBuilder, requests_of: RequestsOf) -> None:
        """Connects a drafter's own builder to what its target's has; see `HeadwiseBuilder`."""
        super().draft_for(target, requests_of)
        assert isinstance(target, CudaMetadataBuilder)
        self.tables = target.tables

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """vLLM's; page tables are made from lengths on the device whenever a layer reads them."""
        if not isinstance(metadata, Split):
            super().update_draft_decode_metadata(metadata)  # type: ignore[misc]

    @contextmanager
    def serving(self, request: Request) -> Iterator[None]:
        """Meanwhile the rows of a batch are those of one made-up request."""
        served = self._splitter
        self._splitter = self.splitter(lambda _: [request])
        try:
            yield
        finally:
            self._splitter = served

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """vLLM's metadata where nothing is dropped and no graph may run, else the split batch."""
        common, splitter = common_attn_metadata, self._splitter
        assert splitter is None or isinstance(splitter, DeviceSplitter)
        self.take_queries()
        decodes = splitter.decodes(common) if splitter else None
        # Whether a graph of a whole step may be captured or run with this metadata.
        in_graph = common.num_actual_tokens <= self.largest_full_graph
        if decodes is None or not (in_graph or decodes.cuts.any()):
            return super().build(common_prefix_len, common, fast_build)
        assert isinstance(splitter, DeviceSplitter)
        wanted = splitter.seen(decodes, common)
        seen: Sees | None = wanted
        if wanted is not None:
            wanted.keep()
        if in_graph and self.graph_queries is not None:
            self.graph_queries.want(None if wanted is None else wanted.queries)
            seen = self.graph_queries
        num_splits = 1 if envs.VLLM_BATCH_INVARIANT else self._max_num_splits(in_graph)
        batch = self.tables.decode_batch(decodes, common, num_splits)
        return Split([batch], seen)

    def take_queries(self) -> None:
        """Takes the last step's queries out of the buffer that the next one overwrites."""
        if self.graph_queries is not None:
            self.graph_queries.hand_over()

    def _any_order(self, layers: Sequence[Any], kernels: Kernels) -> tuple[bool, Sharing | None]:
        """Whether attention takes sequences of one query in any order, and how shared out."""
        return False, None

    def _max_num_splits(self, in_graph: bool) -> int:
        """Parts into which the call may cut a sequence; 0 leaves it to the call."""
        return 0
