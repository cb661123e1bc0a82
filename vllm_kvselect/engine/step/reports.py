"""What a worker reports of its steps, added up from what its requests and its caches say."""

from collections.abc import Iterable

from vllm_kvselect.engine.drop.request import LiveRequests, Request
from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.engine.report import StepReport
from vllm_kvselect.engine.states.worker_contexts import StoredContexts


class Reporter:
    """Says after each step what is new."""

    def __init__(
        self, requests: LiveRequests, states: list[RetentionState], says_plans: bool
    ) -> None:
        self._requests, self._states, self._says_plans = requests, states, says_plans
        self._found: list[Request] = []
        self._num_saved_blocks = 0
        self._reported_seconds = 0.0

    def note(self, found: Iterable[Request]) -> None:
        """Takes note of requests that go on from what was found."""
        self._found += found

    def stats(self) -> dict[str, float]:
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

    def reset(self) -> None:
        """Sets the counts of `stats` to zero."""
        for state in self._states:
            state.reset_counts()
        self._reported_seconds = 0.0

    def take(self, stored: StoredContexts | None) -> StepReport | None:
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
        plans = self._requests.take_new_plans() if self._says_plans else {}
        num_saved_blocks, seconds = self._requests.num_saved_blocks, self._selection_seconds
        selection_seconds = seconds - self._reported_seconds
        loads, *counts = ({}, 0, 0) if stored is None else stored.take_news()
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
