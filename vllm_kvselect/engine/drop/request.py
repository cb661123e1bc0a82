"""What a worker knows of a request: its plan, which never changes, and how far it has come."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.drop.arriving import Arriving
from vllm_kvselect.engine.notice import Found, StepNotice, Swap
from vllm_kvselect.engine.sparse.worker_keys import SparsePrefill
from vllm_kvselect.planning.cuts import Cut
from vllm_kvselect.planning.plan import Plan, plan
from vllm_kvselect.registry import METHODS, Method
from vllm_kvselect.scoring.memory import LastQueries
from vllm_kvselect.selecting.ranking import Candidates


@dataclass(eq=False)
class Progress:
    """How far a request has come since it began, or began again: preemption puts a new one here.

    Attributes:
        serial: No other progress has it.
        num_made: Cuts that are made: what they retain is packed.
        num_found: Tokens that came with a state, 0 if it found none.
        queries: The queries that its next drops look through.
        longest_run: The most packed pages that a head of a layer has; None before the first cut.
        swap: The kernel blocks of the cut that is due, or was made last.
        sparse: What is kept for sparse segments while these are computed.
        followed: Numbers of what a drafter's layers hold packed, where these share pages.
    """

    serial: int = field(default_factory=count().__next__, init=False)
    num_made: int = 0
    num_found: int = 0
    queries: LastQueries = field(default_factory=LastQueries)
    longest_run: Arriving | None = None
    swap: Swap = field(default_factory=lambda: Swap([], []))
    sparse: SparsePrefill | None = None
    followed: Candidates | None = None


@dataclass(eq=False)
class Request:
    """A request in a worker.

    Attributes:
        plan: What was decided about it.
        progress: How far it has come.
        num_computed: Tokens that are computed before the step at hand.
        num_reported: Cuts that were reported: a preempted request makes them again.
        stored_as: The name under which its context is to be stored, or None.
    """

    plan: Plan
    progress: Progress = field(init=False)
    num_computed: int = field(init=False)
    num_reported: int = 0
    stored_as: str | None = None

    def __post_init__(self) -> None:
        self.pause()

    @property
    def method(self) -> Method:
        """The request's method; only requests with a cut have one."""
        return METHODS[self.plan.settings.method]

    @property
    def last_cut(self) -> Cut | None:
        """The last cut that is made."""
        num_made = self.progress.num_made
        return self.plan.cuts[num_made - 1] if num_made else None

    @property
    def next_cut(self) -> Cut | None:
        """The first cut that is not made yet."""
        num_made, cuts = self.progress.num_made, self.plan.cuts
        return cuts[num_made] if num_made < len(cuts) else None

    @property
    def due_cut(self) -> Cut | None:
        """The cut that has to be made before the step at hand."""
        cut = self.next_cut
        return None if cut is None or self.num_computed < cut.position else cut

    def completes_prompt(self, cut: Cut) -> bool:
        """Whether a cut is the last one in the prompt."""
        return cut is self.plan.cuts.last_made(self.plan.num_prompt_tokens)

    def first_query(self, cut: Cut) -> int:
        """Position of the first query that a cut looks through: its own position for none."""
        keeps_scores = self.method.scorer.keeps_scores
        return cut.position - (0 if keeps_scores else self.plan.settings.window)

    @property
    def num_saved_blocks(self) -> int:
        """Blocks that it would hold as well if nothing had been dropped.

        None if it found a state: these blocks would be another's, and are counted there.
        """
        cut = self.last_cut
        return 0 if cut is None or self.progress.num_found else cut.num_freed

    def pause(self) -> None:
        """Forgets how far it has come: its blocks are gone, or it has none yet."""
        segments = self.plan.segments
        sparse = None if segments is None else SparsePrefill(segments, self.plan.settings)
        self.progress, self.num_computed = Progress(sparse=sparse), 0

    def begin(self, num_computed: int, found: Found | None) -> None:
        """Begins, for the first time or again, with what the scheduler found for it."""
        self.pause()
        if found is not None:
            self.progress.num_made, self.progress.num_found = found.num_made, num_computed
        self.come_to(num_computed)

    def come_to(self, num_computed: int) -> None:
        """Takes note of a step's begin."""
        self.num_computed = num_computed
        segments = self.plan.segments
        if segments is not None and num_computed >= segments.end:
            self.progress.sparse = None  # of no use any more

    def complete_cut(self, cut: Cut, longest_run: Arriving | None) -> None:
        """Takes note that the next cut is made."""
        progress = self.progress
        progress.num_made += 1
        progress.longest_run = longest_run
        following = self.next_cut
        needed = cut.position if following is None else self.first_query(following)
        progress.queries.forget_before(needed)


RequestsOf = Callable[[CommonAttentionMetadata], list[Request]]
"""Requests of a batch's rows, in the order of the rows."""


class LiveRequests:
    """Follows the scheduler's messages: a request is known from its first step to its end.

    Attributes:
        per_block: Kernel blocks of a block.
        due: Requests whose next cuts are to be made before the step at hand, in their order.
    """

    def __init__(
        self, eviction: EvictionConfig, block_size: int, page_size: int | None = None
    ) -> None:
        self._eviction, self._sizes = eviction, (block_size, page_size)
        self.per_block = block_size // (page_size or block_size)
        self.due: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._stock = Request(Plan(0, eviction))
        self._unseen: set[str] = set()

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def get(self, request_id: str | None) -> Request:
        """A request; one that drops nothing for the rows of a dummy batch."""
        return self._stock if request_id is None else self._requests.get(request_id, self._stock)

    def update(self, scheduled: SchedulerOutput) -> list[tuple[Request, int]]:
        """Takes over what a step's message says of requests that end, pause and begin.

        Returns:
            Those that go on from a state, each with the id of its first packed kernel block.
        """
        for request_id in scheduled.finished_req_ids:
            self._requests.pop(request_id, None)
            self._unseen.discard(request_id)
        for request_id in scheduled.preempted_req_ids or ():
            if request_id in self._requests:
                self._requests[request_id].pause()
        notice = StepNotice.of(scheduled)
        found, stores = notice.found, notice.stores
        for new in scheduled.scheduled_new_reqs:
            # One that was preempted may come as new again: it is still the same request.
            if new.req_id not in self._requests:
                num_tokens = length_from_prompt_token_ids_or_embeds(
                    new.prompt_token_ids, new.prompt_embeds
                )
                given = new.sampling_params, new.prompt_token_ids, num_tokens
                self._requests[new.req_id] = Request(plan(self._eviction, *given, *self._sizes))
                self._unseen.add(new.req_id)
            request = self._requests[new.req_id]
            request.stored_as = stores.get(new.req_id)
            request.begin(new.num_computed_tokens, found.get(new.req_id))
        cached = scheduled.scheduled_cached_reqs
        for request_id, num_computed in zip(
            cached.req_ids, cached.num_computed_tokens, strict=True
        ):
            known = self._requests.get(request_id)
            if known is None:
                continue
            if request_id in cached.resumed_req_ids:
                known.stored_as = stores.get(request_id)
                known.begin(num_computed, found.get(request_id))
            else:
                known.come_to(num_computed)
        self.due = [self._take_swap(*each) for each in notice.swaps.items()]
        return [
            (request := self._requests[name], self._first_kernel_block(request, each.first_packed))
            for name, each in found.items()
        ]

    def take_new_plans(self) -> dict[str, str]:
        """Fingerprints of the plans of requests that are new since this was last called."""
        taken, self._unseen = self._unseen, set()
        return {
            name: self._requests[name].plan.fingerprint for name in taken if name in self._requests
        }

    @property
    def num_saved_blocks(self) -> int:
        """Blocks that the live requests would hold as well if nothing had been dropped."""
        return sum(request.num_saved_blocks for request in self)

    def _take_swap(self, request_id: str, swap: Swap) -> Request:
        """The request, which knows from now on which blocks its next cut packs into which."""
        request = self._requests[request_id]
        assert request.due_cut is not None, f"{request_id} is not at a cut"
        given_back, fresh = map(self._kernel_blocks, swap)
        request.progress.swap = Swap(given_back, fresh[-request.due_cut.num_packed :])
        return request

    def _first_kernel_block(self, request: Request, block_id: int) -> int:
        """The first packed kernel block of a request, which lies in a block of its table."""
        assert request.last_cut is not None
        return block_id * self.per_block + request.last_cut.first_packed % self.per_block

    def _kernel_blocks(self, block_ids: list[int]) -> list[int]:
        parts = self.per_block
        if parts == 1:
            return block_ids
        return [block_id * parts + part for block_id in block_ids for part in range(parts)]
