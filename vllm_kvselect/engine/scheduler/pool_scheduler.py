"""vLLM's schedulers, with chunks that end at every cut of a request, where they must.

They must for pooled requests. When one resumes after preemption, its chunk may run past a cut.
Where layers share pages, none of them could read what lies past it: what is retained is only known
after the last layer. So the chunk ends at the cut, and the rest comes in the next step.
`SchedulerConfig.scheduler_cls` is vLLM's public seam for it.
"""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_kvselect.engine.scheduler.block_manager import headwise_manager


class PoolScheduler(Scheduler):
    """vLLM's scheduler for everybody but pooled requests that resume."""

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """vLLM's last word on the length of a chunk, running or waiting."""
        num_new_tokens = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        manager = headwise_manager(self.kv_cache_manager)
        cut = manager.cuts_of(request).next_after(num_computed_tokens)
        if cut is None or not manager.is_pooled(request):
            return num_new_tokens
        return min(num_new_tokens, cut.position - num_computed_tokens)


class PoolAsyncScheduler(PoolScheduler, AsyncScheduler):
    """The same for asynchronous scheduling."""
