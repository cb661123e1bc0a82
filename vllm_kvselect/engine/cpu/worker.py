"""EvictionCPUWorker: vLLM's CPU worker with eviction."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvselect.engine.cpu.allocator import keep_freed_memory
from vllm_kvselect.engine.log import logger
from vllm_kvselect.engine.platforms import PLATFORMS
from vllm_kvselect.engine.step.worker import EvictionWorker
from vllm_kvselect.kernels import cpu, tiers
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.kernels.build import KernelError
from vllm_kvselect.scoring.value_norms import OutputProjection


class EvictionCPUWorker(EvictionWorker, CPUWorker):
    """Runs the model with eviction. Only engines that ask for eviction use this worker."""

    # On CPU the platform always asks for this one.
    replaces = AttentionBackendEnum.CPU_ATTN
    backend = PLATFORMS["cpu"].backends[replaces]

    def load_model(self, **kwargs: Any) -> None:
        """Loads the model; what is allocated from then on is kept when it is freed."""
        super().load_model(**kwargs)
        keep_freed_memory()

    def _load_kernels(self) -> Kernels:
        """The CPU kernels; without them selection is slower, which is said and no more."""
        try:
            kernels = cpu.load()
        except KernelError as error:
            logger.warning("KV eviction selects in plain PyTorch, several times slower: %s", error)
            return REFERENCES
        tier = tiers.describe(self.model_config.dtype)
        logger.info("KV eviction selects with compiled kernels: %s", tier)
        return kernels

    def _page_layout(self) -> str:
        instructions = torch.backends.cpu.get_cpu_capability()
        return f"{platform.machine()} {instructions} amx {torch.cpu._is_amx_tile_supported()}"

    def _prepared(self, projection: OutputProjection) -> OutputProjection:
        return cpu.pack(projection) if self._kernels is cpu.KERNELS else projection

    def _begin_step(self, scheduled: SchedulerOutput) -> None:
        """Also zeroes new blocks where vLLM would not: it takes kernel blocks for them.

        A block that held a state may be read before it is full, and what is no number stays none.
        """
        super()._begin_step(scheduled)
        num_blocks = self.cache_config.num_gpu_blocks
        for layer in (layer for builder in self._started for layer in builder.layers):
            if len(layer.kv_cache) == num_blocks:
                return  # vLLM's own way
            for block_id in scheduled.new_block_ids_to_zero or ():
                parts = len(layer.kv_cache) // num_blocks
                layer.kv_cache[block_id * parts : (block_id + 1) * parts].zero_()
        scheduled.new_block_ids_to_zero = None

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's; requests in mid-prefill do not draw from their own random generators.

        Their tokens are drawn and discarded. vLLM then sets a generator back, which a CPU generator
        refuses: with a seed and a prompt in several chunks, stock vLLM 0.32 stops the engine there.
        """
        if self.use_v2_model_runner:
            return super().sample_tokens(grammar_output)
        with _generators_withheld(self.model_runner):
            return super().sample_tokens(grammar_output)


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
