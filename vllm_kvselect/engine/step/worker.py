"""EvictionWorker: what our workers add to vLLM's: our backend, output projections and state.

`ParallelConfig.worker_cls` is vLLM's public seam for it, so that neither prompt lengths nor the
output projections need a hook in vLLM's code.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention import selector
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_kvselect.config import CONFIG_KEY, ConfigError, EvictionConfig
from vllm_kvselect.engine.bind.output_projection import find_output_projections, materialise
from vllm_kvselect.engine.bind.probe import find_probes
from vllm_kvselect.engine.bind.rotation import find_rotations
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
from vllm_kvselect.engine.step.builder import HeadwiseBuilder
from vllm_kvselect.engine.step.contexts import StoredContexts
from vllm_kvselect.engine.step.layer import HeadwiseImpl
from vllm_kvselect.engine.store.identity import StoreIdentity, store_identity
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.planning.cuts import budget_problem
from vllm_kvselect.registry import METHODS, best_method
from vllm_kvselect.scorers import Need, ProbeFile
from vllm_kvselect.scoring.value_norms import OutputProjection

logger = init_logger("vllm.kvselect")  # below "vllm", so that vLLM's logging settings apply


class EvictionWorker(ABC):
    """Runs the model with eviction; put in front of vLLM's worker of a platform.

    Only engines that ask for eviction use it.

    Attributes:
        backend: Path of our attention backend.
        replaces: The name under which vLLM asks for the backend that ours stands in for.
    """

    backend: str
    replaces: AttentionBackendEnum
    vllm_config: VllmConfig
    model_config: ModelConfig
    device: torch.device
    rank: int
    model_runner: Any
    use_v2_model_runner: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._eviction = EvictionConfig.parse(self.vllm_config.additional_config[CONFIG_KEY])
        # Planned once blocks have their size: vLLM may enlarge them when the model is loaded.
        self._requests = LiveRequests(self._eviction, self.vllm_config.cache_config.block_size)
        self._started: list[HeadwiseBuilder] = []
        self._states: list[RetentionState] = []
        self._kernels: Kernels = REFERENCES
        self._num_saved_blocks = 0
        self._reported_seconds = 0.0
        self._report_to_send: StepReport | None = None
        self._found: list[Request] = []
        self._row_ids: list[str] = []
        self._is_dummy = False
        self._store: StoreIdentity | None = None
        self._contexts: StoredContexts | None = None
        self._problems: dict[Need, str] = {}

    @notes_refusals
    def load_model(self, **kwargs: Any) -> None:
        """Loads the model with our attention backend and binds layers to what methods need."""
        with _backend_in_place(self.replaces, self.backend):
            super().load_model(**kwargs)  # type: ignore[misc]
        self._kernels = self._load_kernels()
        probe = self._eviction.of(ProbeFile)
        self._bind("output projection", self._bind_output_projections)
        self._bind("rotation", self._bind_rotations)
        self._bind("probe", self._bind_probes, is_asked_for=probe.probe is not None)
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

    def _prepared(self, projection: OutputProjection) -> OutputProjection:
        """A layer's W_O as the kernels want it."""
        return projection

    def _methods(self) -> list[str]:
        """Methods that a request may run with, by default or by its own choice."""
        if "method" not in self._eviction.allow_override:
            return [self._eviction.method] if self._eviction.enabled else []
        missing = self._problems.keys()
        return [name for name, method in METHODS.items() if method.needs.isdisjoint(missing)]

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

    def kv_eviction_problems(self) -> dict[Need, str]:
        """What methods need and cannot have with this model, and why: requests are refused them."""
        return self._problems

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
        if self._of_drafter:
            [target] = self._started
            for builder in self._builders_of_drafter:
                builder.draft_for(target, self._requests_of)
        if self._store is not None:
            [builder] = self._started
            self._contexts = StoredContexts.of(builder, self._eviction, self.model_config.model)

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

    @cached_property
    def _of_drafter(self) -> frozenset[str]:
        """Names of the attention layers of a drafter; none where it has no layers."""
        if self.use_v2_model_runner:
            return frozenset(getattr(self.model_runner.speculator, "draft_attn_layer_names", ()))
        drafter = getattr(self.model_runner, "drafter", None)
        return frozenset(getattr(drafter, "_draft_attn_layer_names", ()))

    @property
    def _builders_of_drafter(self) -> list[HeadwiseBuilder]:
        """Builders that a drafter has of its own."""
        if self.use_v2_model_runner:
            groups = itertools.chain(*self.model_runner.speculator.attn_groups)
        else:
            groups = self.model_runner.drafter.draft_attn_groups
        return [builder for group in groups for builder in group.metadata_builders]

    def kv_eviction_stats(self) -> dict[str, float]:
        """Counts since the start or the last reset.

        Returns:
            `selection_seconds`: time spent choosing and packing; `estimate_seconds`: time spent
            choosing the blocks that sparse segments read; `num_evicted`: prompts packed;
            `num_requests`: requests that live now, which no reset changes.
        """
        return {
            "selection_seconds": self._selection_seconds,
            "estimate_seconds": sum(state.estimate_stopwatch.seconds for state in self._states),
            "num_evicted": max((state.num_evicted for state in self._states), default=0),
            "num_requests": len(self._requests),
        }

    def reset_kv_eviction_stats(self) -> None:
        """Sets the counts of `kv_eviction_stats` to zero."""
        for state in self._states:
            state.reset_counts()
        self._reported_seconds = 0.0

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
        report = self._report()
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
        self._found += [request for request, _ in found]
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

    def _report(self) -> StepReport | None:
        """What the step packed, or None if nothing changed.

        Time that a device spends is known a few steps later, and reported then.
        """
        made = [each for state in self._states for each in state.completed]
        for state in self._states:
            state.completed.clear()
        contexts = []
        for request in self._found:
            if not request.num_reported and (cut := request.last_cut) is not None:
                contexts.append([request.progress.num_found, cut.num_freed])
                request.num_reported = 1
        self._found = []
        prompts, in_prompts, rounds = [], [], []
        for request, cut, num_freed, num_dropped in made:
            if request.completes_prompt(cut):
                of_all = cut.num_freed, cut.num_dropped
                prompts.append([request.plan.num_prompt_tokens, *of_all])
            elif cut.position <= request.plan.num_prompt_tokens:
                in_prompts.append(num_freed)
            else:
                rounds.append([num_freed, num_dropped])
        plans = self._requests.take_new_plans() if self._eviction.check_integrity else {}
        num_saved_blocks, seconds = self._requests.num_saved_blocks, self._selection_seconds
        selection_seconds = seconds - self._reported_seconds
        loads, *counts = ({}, 0, 0) if self._contexts is None else self._contexts.take_news()
        is_new = made or contexts or plans or selection_seconds or loads or any(counts)
        num_more_saved = num_saved_blocks - self._num_saved_blocks
        if not is_new and not num_more_saved:
            return None
        self._num_saved_blocks, self._reported_seconds = num_saved_blocks, seconds
        made_in = (prompts, in_prompts, rounds)
        numbers = (selection_seconds, num_more_saved)
        return StepReport(*made_in, contexts, *numbers, plans, loads, *counts)

    @property
    def _selection_seconds(self) -> float:
        return sum(state.stopwatch.seconds for state in self._states)

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

    def _bind(
        self,
        need: Need,
        bind: Callable[[], None],
        is_asked_for: bool = False,
    ) -> None:
        """Gives the layers what methods need.

        Without it, only a default method's need is an error, and what the operator asked for.
        """
        if not any(need in METHODS[name].needs for name in self._methods()):
            return
        try:
            bind()
        except ConfigError as error:
            if is_asked_for:
                raise
            default = METHODS.get(self._eviction.method)
            if default is not None and need in default.needs:
                raise ConfigError(f"{error}; {self._next_best(need)}") from None
            self._problems[need] = str(error)
            logger.warning("%s; requests that choose them are refused", error)

    def _next_best(self, missing: Need) -> str:
        """What to take without something that a method needs, and the model cannot give."""
        binds: dict[Need, Callable[[], None]] = {
            "output projection": self._bind_output_projections,
            "rotation": self._bind_rotations,
            "probe": self._bind_probes,
        }
        given = {need for need, bind in binds.items() if need != missing and _succeeds(bind)}
        in_rounds = bool(self._eviction.decode_budget)
        pools = self.vllm_config.parallel_config.pipeline_parallel_size == 1
        name = best_method(
            lambda method: (
                method.needs <= given
                and (method.in_rounds or not in_rounds)
                and (pools or not method.pooled)
            )
        )
        return f"the best without it is --kv-eviction {name}"

    def _bind_output_projections(self) -> None:
        """Gives each layer its W_O."""
        dtype = self.model_config.dtype
        projections = find_output_projections(self.model_runner.get_model(), dtype, self.device)
        for name, layer in self._headwise_layers():
            sizes = layer.num_kv_heads, layer.head_size_v
            projection = materialise(projections[name], *sizes, dtype, self.device)
            layer.impl.output_projection = self._prepared(projection)

    def _bind_rotations(self) -> None:
        """Gives each layer its rotary embedding."""
        model = self.model_runner.get_model()
        rotations = find_rotations(model, self.model_config, self.device)
        for name, layer in self._headwise_layers():
            layer.impl.rotation = rotations.get(name)

    def _bind_probes(self) -> None:
        """Gives each layer its part of the model's probe."""
        layers = dict(self._headwise_layers())
        file = self._eviction.of(ProbeFile).probe
        found = find_probes(self.vllm_config, file, layers.items(), self.device)
        for name, layer in layers.items():
            layer.impl.probe = found[name]

    def _headwise_layers(self) -> Iterator[tuple[str, Attention]]:
        """Attention layers of our backend that choose, by name: a drafter's follow these."""
        for name, layer in get_layers_from_vllm_config(self.vllm_config, Attention).items():
            chooses = layer.kv_sharing_target_layer_name is None and name not in self._of_drafter
            if isinstance(layer.impl, HeadwiseImpl) and chooses:
                yield name, layer


def _succeeds(bind: Callable[[], None]) -> bool:
    """Whether the model can give something, tried out: the start is refused anyway."""
    try:
        bind()
    except ConfigError:
        return False
    return True


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
