"""EvictionGPUWorker: vLLM's CUDA worker with eviction."""

from typing import Any

from vllm.v1.kv_cache_interface import replace_as
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.cuda.builder import CudaMetadataBuilder
from vllm_kvselect.engine.cuda.reserve import choice_bytes
from vllm_kvselect.engine.cuda.tables import buffer_bytes
from vllm_kvselect.engine.cuda.warm_up import warm_up
from vllm_kvselect.engine.log import logger
from vllm_kvselect.engine.platforms import PLATFORMS
from vllm_kvselect.engine.refusal import notes_refusals
from vllm_kvselect.engine.scheduler.spec import HeadwiseSpec
from vllm_kvselect.engine.step.worker import EvictionWorker
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.scoring.value_norms import side_by_side


class EvictionGPUWorker(EvictionWorker, Worker):
    """Runs the model with eviction. Only engines that ask for eviction use this worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replaces = self.vllm_config.attention_config.backend
        self.backend = PLATFORMS["cuda"].backends[self.replaces]

    def _load_kernels(self) -> Kernels:
        # Imports Triton, which only this worker needs.
        from vllm_kvselect.kernels import cuda

        return cuda.KERNELS

    def _bind_output_projections(self) -> None:
        super()._bind_output_projections()
        impls = [layer.impl for _, layer in self._headwise_layers()]
        laid = side_by_side([impl.output_projection for impl in impls])
        for impl, projection in zip(impls, laid, strict=True):
            impl.output_projection = projection

    @notes_refusals
    def compile_or_warm_up_model(self) -> Any:
        """Launches every kernel once before graphs are captured, then as vLLM."""
        # Imports Triton, which only this worker needs.
        from vllm_kvselect.kernels.triton.limits import OutOfResources

        for builder in self._builders:
            assert isinstance(builder, CudaMetadataBuilder)
            try:
                warm_up(builder, self._methods(), self._eviction)
            except OutOfResources as error:
                raise ConfigError(
                    f"kv_eviction's kernels do not fit this GPU with heads of "
                    f"{self.model_config.get_head_size()} channels in {self.model_config.dtype}: "
                    f"{error}; serve this model without --kv-eviction, or in bfloat16"
                ) from error
        return super().compile_or_warm_up_model()

    def _reserved_bytes(self, available: int) -> int:
        """Bytes of page tables, of the state, of queries and of what selection computes at once.

        The last of them is that of the longest prompt; see `choice_bytes`.
        """
        specs = [spec for spec in self.get_kv_cache_spec().values() if type(spec) is HeadwiseSpec]
        if not specs:
            return 0
        # Beside the cache everything is counted in pages, which are kernel blocks. A block may have
        # several, and may be padded, for a state.
        spec, num_layers = specs[0], len(specs)
        size = spec.page_size or spec.block_size
        spec = replace_as(spec, HeadwiseSpec, block_size=size, page_size_padded=None)
        scheduler, model = self.vllm_config.scheduler_config, self.model_config
        tables = buffer_bytes(
            scheduler.max_num_seqs,
            spec.num_kv_heads,
            num_layers,
            model.max_model_len,
            spec.block_size,
        )
        block = 4 * num_layers * (spec.num_kv_heads + 1)
        state = available // (num_layers * spec.page_size_bytes + block) * block
        group = model.get_num_attention_heads(self.vllm_config.parallel_config) // spec.num_kv_heads
        sizes = (num_layers, model.max_model_len, group, self._eviction.window, model.dtype)
        choice = choice_bytes(self._methods(), spec, *sizes, scheduler.max_num_seqs)
        reserved = tables + state + choice + self._bytes_of_queries(available, spec, num_layers)
        logger.info("KV eviction keeps %.2f GiB of the KV cache's memory", reserved / 2**30)
        return reserved

    def _bytes_of_queries(self, available: int, spec: HeadwiseSpec, num_layers: int) -> int:
        """Bytes of the queries that rounds look through, and of the sums that they add up.

        Queries of a whole window, of as many requests as may be short of a round at once: each has
        more entries in the cache than its budget. Those of a step that runs as a graph. And with
        some methods a number for each entry of the cache.
        """
        if not self._eviction.may_drop_again:
            return 0
        model, config = self.model_config, self.vllm_config
        num_heads = model.get_num_attention_heads(config.parallel_config)
        token = num_layers * num_heads * spec.head_size * model.dtype.itemsize
        least = self._eviction.decode_budget
        if not least or "decode_budget" in self._eviction.allow_override:
            least = self._eviction.window + spec.block_size  # what `budget_problem` lets pass
        held = least // spec.block_size * num_layers * spec.page_size_bytes
        window, max_num_seqs = self._eviction.window * token, config.scheduler_config.max_num_seqs
        num_rows = 0
        if config.compilation_config.cudagraph_mode.has_full_cudagraphs():
            largest = config.compilation_config.max_cudagraph_capture_size or 0
            num_rows = min(largest, max_num_seqs)
        num_windows = min(max_num_seqs, available // (held + window))
        return num_windows * window + num_rows * token + self._bytes_of_numbers(available)
