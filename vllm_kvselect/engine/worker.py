"""EvictionCPUWorker: vLLM's CPU worker with our backend, bound output projections and state.

`ParallelConfig.worker_cls` is vLLM's public seam for it, so that neither prompt lengths nor the
output projections need a hook in vLLM's code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention import selector
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvselect.config import CONFIG_KEY, EvictionConfig
from vllm_kvselect.engine.checks import refuse_mixed_groups
from vllm_kvselect.engine.cpu_backend import HeadwiseCPUAttentionImpl
from vllm_kvselect.engine.metrics import StepReport
from vllm_kvselect.engine.output_projection import find_output_projections, materialise
from vllm_kvselect.engine.prompts import LivePrompts, Prompt
from vllm_kvselect.engine.spec import HeadwiseSpec, with_eviction
from vllm_kvselect.engine.state import RetentionState
from vllm_kvselect.kernels import cpu
from vllm_kvselect.methods import METHODS, NO_TWINS, Twins

logger = init_logger(__name__)

_BACKEND = "vllm_kvselect.engine.cpu_backend.HeadwiseCPUAttentionBackend"


class EvictionCPUWorker(CPUWorker):
    """Runs the model with eviction. Only engines that ask for eviction use this worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._eviction = EvictionConfig.parse(self.vllm_config.additional_config[CONFIG_KEY])
        block_size = self.vllm_config.cache_config.block_size
        self._prompts = LivePrompts(self._eviction, block_size)
        self._states: list[RetentionState] = []
        self._twins: Twins = NO_TWINS
        self._num_saved_blocks = 0

    def load_model(self, **kwargs: Any) -> None:
        """Loads the model with our attention backend and binds the output projections."""
        with _backend_in_place():
            super().load_model(**kwargs)
        self._twins = _load_kernels()
        if any(METHODS[name].perturbation for name in self._methods()):
            self._bind_output_projections()

    def _methods(self) -> list[str]:
        """Methods that a request may run with, by default or by its own choice."""
        if "method" in self._eviction.allow_override:
            return list(METHODS)
        return [self._eviction.method]

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """vLLM's specs, with the eviction configuration."""
        specs = super().get_kv_cache_spec()
        return {name: with_eviction(spec, self._eviction) for name, spec in specs.items()}

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates the KV cache, then connects builders and layers to the state beside it."""
        refuse_mixed_groups(kv_cache_config, self.vllm_config.cache_config.block_size)
        super().initialize_from_config(kv_cache_config)
        self._states = [
            builder.start(kv_cache_config.num_blocks, self._prompts_of, self._twins)
            for groups in self.model_runner.attn_groups
            for group in groups
            for builder in group.metadata_builders
            if isinstance(builder.kv_cache_spec, HeadwiseSpec)
        ]

    def kv_eviction_stats(self) -> dict[str, float]:
        """Counts since the start or the last reset.

        Returns:
            `selection_seconds`: time spent choosing and packing; `num_evicted`: prompts packed;
            `num_requests`: requests that live now, which no reset changes.
        """
        return {
            "selection_seconds": self._selection_seconds,
            "num_evicted": max((state.num_evicted for state in self._states), default=0),
            "num_requests": len(self._prompts),
        }

    def reset_kv_eviction_stats(self) -> None:
        """Sets the counts of `kv_eviction_stats` to zero."""
        for state in self._states:
            state.selection_seconds, state.num_evicted = 0.0, 0

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """vLLM's step, with the prompts it brings taken note of and what it packed reported."""
        self._prompts.update(scheduler_output)
        seconds_before = self._selection_seconds
        output = super().execute_model(scheduler_output)
        report = self._report(self._selection_seconds - seconds_before)
        if report is None:
            return output
        if output is EMPTY_MODEL_RUNNER_OUTPUT:  # requests ended, and there was nothing to run
            return ModelRunnerOutput.with_kv_conn_output_only(report.as_connector_output())
        # The runner sends it along once it has sampled.
        self.model_runner.kv_connector_output = report.as_connector_output()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's; requests in mid-prefill do not draw from their own random generators.

        Their tokens are drawn and discarded. vLLM then sets a generator back, which a CPU generator
        refuses: with a seed and a prompt in several chunks, stock vLLM 0.32 stops the engine there.
        """
        if self.use_v2_model_runner:
            return super().sample_tokens(grammar_output)
        with _generators_withheld(self.model_runner):
            return super().sample_tokens(grammar_output)

    def _report(self, selection_seconds: float) -> StepReport | None:
        """What the step packed, or None if nothing changed."""
        packed = {prompt for state in self._states for prompt in state.completed}
        for state in self._states:
            state.completed.clear()
        counted = [
            [prompt.num_tokens, prompt.plan.first_packed]
            for prompt in packed
            if prompt.plan is not None and not prompt.is_counted
        ]
        for prompt in packed:
            prompt.is_packed = prompt.is_counted = True
        num_saved_blocks = self._prompts.num_saved_blocks
        if not packed and num_saved_blocks == self._num_saved_blocks:
            return None
        self._num_saved_blocks = num_saved_blocks
        return StepReport(counted, selection_seconds if packed else 0.0, num_saved_blocks)

    @property
    def _selection_seconds(self) -> float:
        return sum(state.selection_seconds for state in self._states)

    def _prompts_of(self, batch: CommonAttentionMetadata) -> list[Prompt]:
        """Prompts of a batch's rows, whose order both model runners know."""
        if self.use_v2_model_runner:
            ids = self.model_runner.req_states.index_to_req_id
            return [self._prompts[ids[int(i)]] for i in batch.req_idx[: batch.num_reqs]]
        ids = self.model_runner.input_batch.req_ids
        return [self._prompts[ids[row]] for row in range(batch.num_reqs)]

    def _bind_output_projections(self) -> None:
        projections = find_output_projections(self.model_runner.get_model())
        for name, layer in get_layers_from_vllm_config(self.vllm_config, Attention).items():
            if not isinstance(layer.impl, HeadwiseCPUAttentionImpl):
                continue
            projection = materialise(
                projections[name],
                layer.num_kv_heads,
                layer.head_size_v,
                self.model_config.dtype,
                self.device,
            )
            layer.impl.output_projection = cpu.pack(projection) if self._twins else projection


def _load_kernels() -> Twins:
    """The CPU kernels; without them selection is slower, which is said and no more."""
    try:
        return cpu.load()
    except cpu.KernelError as error:
        logger.warning("%s; selection runs in plain PyTorch, several times slower", error)
        return NO_TWINS


@contextmanager
def _generators_withheld(runner: Any) -> Iterator[None]:
    """Takes the seeded generators of rows whose token will be discarded out of the batch."""
    generators, num_reqs = runner.input_batch.generators, runner.input_batch.num_reqs
    discarded = runner.discard_request_mask.np[:num_reqs].nonzero()[0].tolist()
    withheld = {row: generators.pop(row) for row in discarded if row in generators}
    try:
        yield
    finally:
        generators.update(withheld)


@contextmanager
def _backend_in_place() -> Iterator[None]:
    """Lets the layers created meanwhile take our backend, and no engine after them.

    On CPU the platform always asks for `CPU_ATTN`, so that name is overridden. vLLM caches its
    choice per process, and a process may hold several engines.
    """
    register_backend(AttentionBackendEnum.CPU_ATTN, _BACKEND)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
        selector._cached_get_attn_backend.cache_clear()
