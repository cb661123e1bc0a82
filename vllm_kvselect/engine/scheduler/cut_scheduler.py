"""vLLM's schedulers, where a request's cut matters for when and how far it is computed.

Pooled requests: when one resumes after preemption, its chunk may run past a cut. Where layers share
pages, none of them could read what lies past it: what is retained is only known after the last
layer. So the chunk ends at the cut, and the rest comes in the next step.

Rounds: what a request generates up to one is computed before it, and the rest after it. So no chunk
runs past a round: neither that of a request that resumes, nor one with drafts.

Sparse prefills: a segment is computed in one step. So a chunk that would end inside one ends before
it, and a request whose next segment does not fit into a step waits.

Marked contexts: requests that come with the same one at once would all compress it. The first one
does; the others wait until they can read what it made.

`SchedulerConfig.scheduler_cls` is vLLM's public seam for it.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

from vllm_kvselect.engine.report import ContextReport
from vllm_kvselect.engine.scheduler.block_manager import (
    HeadwiseManager,
    headwise_manager,
    shares_contexts,
)


class CutScheduler(Scheduler):
    """vLLM's scheduler, for requests whose chunks or whose turn are ours to decide."""

    _reported = ContextReport(0, 0)

    def add_request(self, request: Request) -> None:
        """Takes a new request; blocks that are computed sparsely get names of their own."""
        if request.request_id not in self.requests:
            for manager in self.kv_cache_manager.coordinator.single_type_managers:
                if isinstance(manager, HeadwiseManager):
                    manager.name_blocks(request)
        super().add_request(request)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """vLLM's last word on the length of a chunk, running or waiting."""
        num_new_tokens = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        manager = headwise_manager(self.kv_cache_manager)
        first = num_computed_tokens
        if not manager.is_pooled(request):  # only rounds matter
            first = max(first, request.num_prompt_tokens)
        end = num_computed_tokens + num_new_tokens
        cut = manager.cuts_of(request).next_after(first)
        if cut is not None:
            end = min(end, cut.position)
        if segments := manager.segments_of(request):
            end = segments.last_border(end)
        return max(0, end - num_computed_tokens)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """vLLM's answer to whether a waiting request may be scheduled now."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        manager = headwise_manager(self.kv_cache_manager)
        if not shares_contexts(self.kv_cache_manager, request):
            return True
        context = manager.context_of(request)
        if context is None:
            return True
        return manager.has_context(request) or not any(
            manager.context_of(other) == context and _is_before_its_cut(manager, other)
            for other in self.running
        )

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """vLLM's statistics of a step, with the contexts that are held if they have changed."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            report = ContextReport(*headwise_manager(self.kv_cache_manager).held_contexts())
            if report != self._reported:
                self._reported = report
                report.add_to(stats)
        return stats


class CutAsyncScheduler(CutScheduler, AsyncScheduler):
    """The same for asynchronous scheduling."""


def _is_before_its_cut(manager: HeadwiseManager, request: Request) -> bool:
    """Whether a request still computes what comes before its first cut."""
    return request.num_computed_tokens < manager.cuts_of(request).first_position
