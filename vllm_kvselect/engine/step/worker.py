"""EvictionWorker: what our workers add to vLLM's: our backend, state, cuts before each step.

`ParallelConfig.worker_cls` is vLLM's public seam for it, so that neither prompt lengths nor the
output projections need a hook in vLLM's code.
"""

import itertools
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import CacheConfig
from vllm.v1.attention import selector
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_kvselect.config import CONFIG_KEY, ConfigError, EvictionConfig
from vllm_kvselect.engine.drop.request import LiveRequests, Request
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.engine.models import (
    refuse_drafter_apart,
    refuse_mixed_groups,
    refuse_other_options,
)
from vllm_kvselect.engine.notice import StepNotice
from vllm_kvselect.engine.platforms import fixed_page_size, page_size_of
from vllm_kvselect.engine.refusal import notes_refusals
from vllm_kvselect.engine.report import StepReport
from vllm_kvselect.engine.scheduler.spec import HeadwiseSpec, with_eviction
from vllm_kvselect.engine.start_up import is_length_open, log_retained
from vllm_kvselect.engine.states.identity import StoreIdentity, store_identity
from vllm_kvselect.engine.states.worker_contexts import StoredContexts
from vllm_kvselect.engine.step.binding import BindingWorker
from vllm_kvselect.engine.step.builder import HeadwiseBuilder
from vllm_kvselect.engine.step.reports import Reporter
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.planning.cuts import budget_problem
from vllm_kvselect.registry import METHODS


class EvictionWorker(BindingWorker):
    """Runs the model with eviction; put in front of vLLM's worker of a platform.

    Only engines that ask for eviction use it. Its `backend` stands in for that which vLLM asks for
    by the name `replaces`.
    """

    backend: str
    replaces: AttentionBackendEnum
    rank: int
    cache_config: CacheConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._eviction = EvictionConfig.parse(self.vllm_config.additional_config[CONFIG_KEY])
        # Planned once blocks have their size: vLLM may enlarge them when the model is loaded.
        self._requests = LiveRequests(self._eviction, self.vllm_config.cache_config.block_size)
        self._started: list[HeadwiseBuilder] = []
        self._states: list[RetentionState] = []
        self._kernels: Kernels = REFERENCES
        self._report_to_send: StepReport | None = None
        self._row_ids: list[str] = []
        self._is_dummy = False
        self._store: StoreIdentity | None = None
        self._contexts: StoredContexts | None = None

    @notes_refusals
    def load_model(self, **kwargs: Any) -> None:
        """Loads the model with our attention backend and binds layers to what methods need."""
        with _backend_in_place(self.replaces, self.backend):
            super().load_model(**kwargs)  # type: ignore[misc]
        self._kernels = self._load_kernels()
        self._bind_layers()
        if self._eviction.context_store is not None:
            reads_probe = any("probe" in METHODS[name].needs for name in self._methods())
            layout = f"{self.backend} {self._page_layout()}"
            self._store = store_identity(self.vllm_config, self._eviction, layout, reads_probe)

    def _page_layout(self) -> str:
        """What the order of the elements in a page depends on besides vLLM and the backend."""
        return ""

    @abstractmethod
    def _load_kernels(self) -> Kernels:
        """Fast kernels of the references for this device."""

    @property
    def _keeps_numbers(self) -> bool:
        """Whether a cut may read what an earlier one scored entries by."""
        keep = any(METHODS[method].scorer.keeps_scores for method in self._methods())
        return keep and self._eviction.may_drop_again

    def _bytes_of_numbers(self, available: int) -> int:
        """Bytes of what entries are scored by, of the cache and them together."""
        specs = [spec for spec in self.get_kv_cache_spec().values() if type(spec) is HeadwiseSpec]
        if not self._keeps_numbers or not specs:
            return 0
        spec = specs[0]
        numbers = 4 * spec.num_kv_heads * spec.block_size
        return -(-available * numbers // (spec.page_size_bytes + numbers))

    def determine_available_memory(self) -> int:
        """vLLM's, less what eviction keeps beside the KV cache.

        A size that the user gave is left as it is.
        """
        # Asked before: a start-up plan of vLLM's (VLLM_ENABLE_STARTUP_PLAN) puts its own there.
        is_given = self.cache_config.kv_cache_memory_bytes is not None
        available: int = super().determine_available_memory()  # type: ignore[misc]
        return available if is_given else available - self._reserved_bytes(available)

    def _reserved_bytes(self, available: int) -> int:
        """Bytes of what is kept beside the KV cache, of both together."""
        return self._bytes_of_numbers(available)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """vLLM's specs, with the eviction configuration."""
        specs = super().get_kv_cache_spec()  # type: ignore[misc]
        ours = self._eviction, fixed_page_size(self.vllm_config), self._store
        return {name: with_eviction(spec, *ours) for name, spec in specs.items()}

    @notes_refusals
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates the KV cache, then connects builders and layers to the state beside it."""
        refuse_other_options(kv_cache_config, self._eviction)
        refuse_mixed_groups(kv_cache_config, self.vllm_config)
        if is_length_open(self.vllm_config):
            self._take_note_of_length()
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        for index, group in enumerate(kv_cache_config.kv_cache_groups):
            spec = group.kv_cache_spec
            if isinstance(spec, HeadwiseSpec):
                self._group_id = index
                self._requests = LiveRequests(self._eviction, spec.block_size, spec.page_size)
        self._started = self._builders
        if self._of_drafter:
            names = [builder.layer_names for builder in self._started]
            refuse_drafter_apart(names, self._of_drafter)
        self._states = [
            builder.start(
                self._requests_of,
                self._kernels,
                self._of_drafter,
                self._requests.per_block,
                self._keeps_numbers,
            )
            for builder in self._started
        ]
        says_plans = self._eviction.check_integrity
        self._reporter = Reporter(self._requests, self._states, says_plans)
        if self._of_drafter:
            [target] = self._started
            for builder in self._builders_of_drafter:
                builder.draft_for(target, self._requests_of)
        if self._store is not None:
            [builder] = self._started
            kv_cache, ours = builder.layers[0].kv_cache, (self._eviction, self.vllm_config)
            self._contexts = StoredContexts.of(kv_cache, builder.state, *ours)

    def _take_note_of_length(self) -> None:
        """What the front end checks and says of `max_model_len`, where vLLM fitted it to the pool.

        Raises:
            ConfigError: If the budget is too small for prompts of that length.
        """
        sizes = self.model_config.max_model_len, page_size_of(self.vllm_config)
        if problem := budget_problem(*sizes, self._eviction):
            raise ConfigError(f"--max-model-len auto leaves too short prompts here: {problem}")
        if self.rank == 0 and not self.vllm_config.parallel_config.data_parallel_rank:
            log_retained(self.vllm_config, self._eviction)

    def shutdown(self) -> None:
        """vLLM's, once contexts that are being stored are written."""
        if self._contexts is not None:
            self._contexts.close()
        super().shutdown()  # type: ignore[misc]

    @property
    def _builders(self) -> list[HeadwiseBuilder]:
        return [
            builder
            for groups in self.model_runner.attn_groups
            for group in groups
            for builder in group.metadata_builders
            if isinstance(builder, HeadwiseBuilder)
            and isinstance(builder.kv_cache_spec, HeadwiseSpec)
        ]

    @property
    def _builders_of_drafter(self) -> list[HeadwiseBuilder]:
        """Builders that a drafter has of its own."""
        if self.use_v2_model_runner:
            groups = itertools.chain(*self.model_runner.speculator.attn_groups)
        else:
            groups = self.model_runner.drafter.draft_attn_groups
        return [builder for group in groups for builder in group.metadata_builders]

    def kv_eviction_stats(self) -> dict[str, float]:
        """Counts since the start or the last reset; see `Reporter.stats`."""
        return self._reporter.stats()

    def reset_kv_eviction_stats(self) -> None:
        """Sets these counts to zero."""
        self._reporter.reset()

    def execute_dummy_batch(self) -> None:
        """vLLM's: while others of its engine's group have work, a rank computes with them.

        Its made-up rows take places that requests may have, which wait meanwhile.
        """
        self._is_dummy = True
        try:
            super().execute_dummy_batch()  # type: ignore[misc]
        finally:
            self._is_dummy = False

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """vLLM's step, with the prompts it brings taken note of and what it packed reported."""
        self._begin_step(scheduler_output)
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        if self._contexts is not None:
            self._contexts.save(self._states[0].completed)
        report = self._reporter.take(self._contexts)
        if report is None:
            return output
        if output is EMPTY_MODEL_RUNNER_OUTPUT:  # requests ended, and there was nothing to run
            return ModelRunnerOutput.with_kv_conn_output_only(report.as_connector_output())
        if self.use_v2_model_runner:
            self._report_to_send = report
        else:
            # The runner sends it along once it has sampled.
            self.model_runner.kv_connector_output = report.as_connector_output()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's; model runner V2 writes its own reports at the end, so ours is added after."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        report, self._report_to_send = self._report_to_send, None
        if report is not None and output is not None:
            # Under async scheduling the output is still on its way, but this part is final.
            result = getattr(output, "model_runner_output", output)
            # That of a stage before the last one is everybody's, and nobody reads it.
            if result is not EMPTY_MODEL_RUNNER_OUTPUT:
                result.kv_connector_output = report.as_connector_output()
        return output

    def _begin_step(self, scheduled: SchedulerOutput) -> None:
        """Takes note of what the scheduler says of a step, and makes the cuts that are due."""
        found = self._requests.update(scheduled)
        self._reporter.note(request for request, _ in found)
        self._swap_blocks(StepNotice.of(scheduled))
        if self.use_v2_model_runner:
            # Brings that model runner.
            from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

            self._row_ids = sort_batch_req_ids(
                scheduled.num_scheduled_tokens,
                scheduled.scheduled_spec_decode_tokens,
                self.model_runner.decode_query_len,
            )
        with torch.inference_mode():
            for builder in self._started:
                builder.take_queries()
                builder.due.make(self._requests.due)
                # After them: what is found may be packed in this very step.
                builder.state.go_on(found)
            # Last: until here cuts read blocks that were given back.
            if self._contexts is not None:
                self._contexts.load(scheduled)

    def _swap_blocks(self, notice: StepNotice) -> None:
        """Lets vLLM's runner know of the blocks that cuts pack into: it is told of new ones alone.

        A request that is not in the batch comes back with what is remembered of it.
        """
        if not notice.swaps:
            return
        runner, group = self.model_runner, self._group_id
        if (event := getattr(runner, "prepare_inputs_event", None)) is not None:
            event.synchronize()  # the last step's tables may still be on their way to the device
        for request_id, swap in notice.swaps.items():
            cut = self._requests[request_id].next_cut
            assert cut is not None
            places = slice(cut.num_freed, cut.first_of_tail)
            if self.use_v2_model_runner:
                row = runner.req_states.req_id_to_index[request_id]
                table = runner.block_tables.block_tables[group]
                table.stage_write(row, places.start, swap.fresh)
                continue
            runner.requests[request_id].block_ids[group][places] = swap.fresh
            if (row := runner.input_batch.req_id_to_index.get(request_id)) is not None:
                runner.input_batch.block_table[group].block_table.np[row, places] = swap.fresh

    def _requests_of(self, batch: CommonAttentionMetadata) -> list[Request]:
        """Requests of a batch's rows: those of the step, also where a drafter is computed after it.

        Model runner V2 has the order of its rows from the step alone. Not all of its batches say
        where their rows are among its requests: those of a drafter and of hybrids do not.
        """
        ids = self._row_ids if self.use_v2_model_runner else self.model_runner.input_batch.req_ids
        ids = [] if self._is_dummy else ids[: batch.num_reqs]
        # Rows that pad a batch to the size of a graph, and those of dummy batches, have none.
        padding = [None] * (batch.num_reqs - len(ids))
        return [self._requests.get(request_id) for request_id in (*ids, *padding)]


@contextmanager
def _backend_in_place(replaced: AttentionBackendEnum, backend: str) -> Iterator[None]:
    """Lets the layers created meanwhile take our backend, and no engine after them.

    vLLM caches its choice per process, and a process may hold several engines.
    """
    register_backend(replaced, backend)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        replaced.clear_override()
        selector._cached_get_attn_backend.cache_clear()
