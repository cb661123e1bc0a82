"""vLLM's schedulers, with the chunks of pooled requests ending where their prompts end.

A preempted request resumes with a chunk that runs past its prompt. Where layers share pages, none
of them could read what lies past it: what is retained is only known after the last one. So the
chunk is cut, and the rest comes in the next step. `SchedulerConfig.scheduler_cls` is vLLM's public
seam for it.
"""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_kvselect.engine.block_manager import headwise_manager


class PoolScheduler(Scheduler):
    """vLLM's scheduler for everybody but pooled requests that resume."""

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """vLLM's last word on the length of a chunk, running or waiting."""
        num_new_tokens = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        num_left = request.num_prompt_tokens - num_computed_tokens
        if not 0 < num_left < num_new_tokens:
            return num_new_tokens
        is_pooled = headwise_manager(self.kv_cache_manager).is_pooled(request)
        return num_left if is_pooled else num_new_tokens


class PoolAsyncScheduler(PoolScheduler, AsyncScheduler):
    """The same for asynchronous scheduling."""
