"""vLLM's schedulers with an integrity check after every step (`--kv-eviction-check-integrity`).

`SchedulerConfig.scheduler_cls` is vLLM's public seam for it.
"""

from collections.abc import Collection, Mapping
from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_kvselect.engine.log import logger
from vllm_kvselect.engine.report import StepReport
from vllm_kvselect.engine.scheduler.block_manager import headwise_manager
from vllm_kvselect.engine.scheduler.cut_scheduler import CutScheduler
from vllm_kvselect.engine.scheduler.integrity import (
    Violation,
    block_owners,
    find_violations,
    free_blocks,
    names_of,
    plan_violations,
    written_violations,
)


class CheckedScheduler(CutScheduler):
    """Stops the requests whose blocks are not what they must be; the server goes on.

    A request that is stopped ends with the finish reason `error`, which the OpenAI server turns
    into an error of its own (HTTP 500, or an error in the stream).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._condemned: set[str] = set()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM's schedule, between two checks."""
        # The first sees what finished and aborted requests left: allocation might cover it up.
        self._check()
        names = names_of(self._manager)
        output = super().schedule(*args, **kwargs)
        self._check()
        self._condemn(written_violations(self._manager, self.requests, output, names))
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """vLLM's update, without the tokens of the requests that are stopped."""
        if (report := StepReport.of(model_runner_output)) is not None:
            self._condemn(plan_violations(self._manager, self.requests, report.plans))
        # Finished first, they get none of the tokens of this step, which may be wrong.
        stopped = self.finish_requests(self._condemned, RequestStatus.FINISHED_ERROR)
        self._condemned.clear()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request in stopped:
            logger.error("KV cache integrity: stopped request %s", request.request_id)
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
        return outputs

    def _check(self) -> None:
        self._condemn(find_violations(self.kv_cache_manager, self.requests))

    def _condemn(self, found: Collection[Violation]) -> None:
        """Notes whose requests are stopped with the next output."""
        violations = [
            violation
            for violation in found
            if not violation.request_ids or not self._condemned.issuperset(violation.request_ids)
        ]
        if not violations:
            return
        for violation in violations:
            logger.error("KV cache integrity: %s", violation)
            self._condemned.update(violation.request_ids)
        mend(self.kv_cache_manager, self.requests, violations)


class CheckedAsyncScheduler(CheckedScheduler, AsyncScheduler):
    """The same for asynchronous scheduling."""


def mend(
    kv: KVCacheManager, requests: Mapping[str, Request], violations: Collection[Violation]
) -> None:
    """Puts the counts of the blocks concerned right, and forgets what they and their owners hashed.

    Afterwards the requests concerned can be finished as any other, and no block that is wrong is
    found by its hash. Only for requests that are finished next: their entries may be wrong. What
    others hold is freed.
    """
    managers, pool = kv.coordinator.single_type_managers, kv.block_pool
    named = {block_id for violation in violations for block_id in violation.block_ids}
    for request_id in {name for violation in violations for name in violation.request_ids}:
        headwise_manager(kv).names.forget(request_id)  # else others find what it computes
        for manager in managers:
            named |= {block.block_id for block in manager.req_to_blocks.get(request_id, ())}
            if request_id not in requests:
                manager.req_to_blocks.pop(request_id, None)
    named.discard(pool.null_block.block_id)
    kv.evict_blocks(named)
    if any(violation.invariant == "hashes" for violation in violations):
        pool.cached_block_hash_to_block = BlockHashToBlockMap()
        for block in pool.blocks:
            if block.block_hash is not None:
                pool.cached_block_hash_to_block.insert(block.block_hash, block)
    owners = block_owners(kv)
    free = {block.block_id for block in free_blocks(pool)}
    for block in (pool.blocks[block_id] for block_id in sorted(named)):
        block.ref_cnt = len(owners.get(block.block_id, ()))
        if block.block_id in free and block.ref_cnt:
            pool.free_block_queue.remove(block)
        elif block.block_id not in free and not block.ref_cnt:
            pool.free_block_queue.append(block)
    pool.free_block_queue.num_free_blocks = len(free_blocks(pool))
