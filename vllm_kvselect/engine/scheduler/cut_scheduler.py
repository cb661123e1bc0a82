"""vLLM's schedulers, whose chunks end at cuts; a request may wait for what another computes.

Cuts: what a request computes up to one is computed before it, and the rest after it. So no chunk
runs past any: neither that of a long prompt, nor that of a request that resumes, nor one with
drafts. And nobody sees the queries of a step that runs as one graph: so no step computes as few of
the tokens that a cut looks through as a graph takes of a request.

Sparse prefills: a segment is computed in one step. So a chunk that would end inside one ends before
it, and a request whose next segment does not fit into a step waits.

States beside attention: a request that resumes needs the state behind the last token it takes from
the prefix cache. So a chunk ends there, where it is kept.

Requests that come with the same beginning at once would all compress it. The first one does; the
others wait until they can read what it made. So do those whose marked context is in a folder, until
workers have read it.

`SchedulerConfig.scheduler_cls` is vLLM's public seam for it.
"""

from time import monotonic
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_kvselect.engine.log import logger
from vllm_kvselect.engine.notice import StepNotice
from vllm_kvselect.engine.platforms import has_drafter_layers, tokens_ahead, tokens_in_graph
from vllm_kvselect.engine.report import StatesReport, StepReport
from vllm_kvselect.engine.scheduler.block_manager import (
    PlannedManager,
    StateManager,
    headwise_manager,
    shares_states,
)
from vllm_kvselect.metrics import States
from vllm_kvselect.planning.cuts import chunk_end


class CutScheduler(Scheduler):
    """vLLM's scheduler, for requests whose chunks or whose turn are ours to decide."""

    _reported = States(0, 0)
    _looked_at = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._manager = manager = headwise_manager(self.kv_cache_manager)
        manager.num_ahead = tokens_ahead(self.vllm_config)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        manager.shares_states = len(managers) == 1
        # What is remembered of a drafter's layers between cuts is not in the cache.
        manager.names.are_cut_again = not has_drafter_layers(self.vllm_config)
        for each in managers:
            if isinstance(each, PlannedManager):
                each.sizes = manager.sizes
        if any(isinstance(m, StateManager) for m in managers):
            self._log_blocks()
        self._keeps_states = any(isinstance(m, StateManager) and m.keeps_states for m in managers)
        self._tokens_in_graph = tokens_in_graph(self.vllm_config)

    def _log_blocks(self) -> None:
        """Says what blocks are, where they are as large as a state."""
        block_size, page_size = self._manager.sizes
        group = self.kv_cache_config.kv_cache_groups[self._manager.kv_cache_group_id]
        logger.info(
            "KV eviction: a block holds %d tokens of the %d layers with full attention, in pages "
            "of %d, or states; %d blocks",
            block_size,
            len(group.layer_names),
            page_size or block_size,
            self.kv_cache_config.num_blocks,
        )

    def add_request(self, request: Request) -> None:
        """Takes a new request; blocks that are computed sparsely get names of their own."""
        if request.request_id not in self.requests:
            self._manager.name_blocks(request)
        super().add_request(request)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """vLLM's last word on the length of a chunk, running or waiting."""
        num_new_tokens = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        plan = self._manager.plan_of(request)
        if plan.is_stock:
            return num_new_tokens
        end = num_computed_tokens + num_new_tokens
        if (cut := plan.cuts.next_after(num_computed_tokens)) is not None:
            # What is generated comes token by token, and a graph keeps its queries for rounds.
            in_graph = self._tokens_in_graph if cut.position <= plan.num_prompt_tokens else 0
            end = chunk_end(num_computed_tokens, end, cut, plan.settings.window, in_graph)
        if self._keeps_states:
            border = self._manager.most_found(request)
            end = border if num_computed_tokens < border < end else end
        if plan.segments:
            end = plan.segments.last_border(end)
        return max(0, end - num_computed_tokens)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """vLLM's answer to whether a waiting request may be scheduled now."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        if not shares_states(self.kv_cache_manager, request):
            return True
        if self._manager.is_on_its_way(request, self.running):
            return False
        loads = self._manager.loads
        return loads is None or not loads.must_wait(request, self._manager.plan_of(request))

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM's schedule; workers are told of cuts, and who begins with a context, or leaves one.

        Blocks of a request that was preempted in this very schedule may be swapped for nothing.
        """
        scheduled = super().schedule(*args, **kwargs)
        manager, cached = self._manager, scheduled.scheduled_cached_reqs
        begun = [new.req_id for new in scheduled.scheduled_new_reqs] + [*cached.resumed_req_ids]
        notice = StepNotice() if manager.loads is None else manager.loads.take_notice()
        swaps, runs = manager.take_swaps(), scheduled.num_scheduled_tokens
        notice.swaps = {name: swap for name, swap in swaps.items() if name in runs}
        notice.found = {name: manager.found[name] for name in begun if name in manager.found}
        notice.stores = self._stores(begun)
        if notice.says_something:
            notice.add_to(scheduled)
        return scheduled

    def _stores(self, begun: list[str]) -> dict[str, str]:
        """Names under which the contexts of requests that begin are to be stored."""
        manager, names = self._manager, dict[str, str]()
        for request in (self.requests[request_id] for request_id in begun):
            if manager.loads is not None and shares_states(self.kv_cache_manager, request):
                plan, found = manager.plan_of(request), manager.found.get(request.request_id)
                if (name := manager.loads.name_to_store(request, plan, found)) is not None:
                    names[request.request_id] = name
        return names

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """vLLM's update; stored contexts that workers have read are found from now on."""
        loads = self._manager.loads
        if loads is not None and (report := StepReport.of(model_runner_output)) is not None:
            loads.finish(report.loads)
        return super().update_from_output(scheduler_output, model_runner_output)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """vLLM's; blocks that wait for a stored context are given back before."""
        if (loads := self._manager.loads) is not None:
            loads.drop_all()
        return super().reset_prefix_cache(*args, **kwargs)

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """vLLM's statistics of a step, with the states that are held if they have changed."""
        stats, now = super().make_stats(*args, **kwargs), monotonic()
        names = self._manager.names
        # Which are gone is asked state by state: once a second will do.
        if stats is not None and (names.has_new or now >= self._looked_at + 1):
            held, before, self._looked_at = names.held(), self._reported, now
            if held != before:
                self._reported = held
                report = StatesReport(
                    held.num_states - before.num_states, held.num_blocks - before.num_blocks
                )
                report.add_to(stats)
        return stats


class CutAsyncScheduler(CutScheduler, AsyncScheduler):
    """The same for asynchronous scheduling."""
