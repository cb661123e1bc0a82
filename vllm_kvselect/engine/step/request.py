"""What a worker knows of a request: everything of it lives here, and ends with it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, Self

import torch
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.step.arriving import Arriving
from vllm_kvselect.engine.step.key_blocks import SparsePrefill
from vllm_kvselect.engine.step.received import Received
from vllm_kvselect.engine.step.seen_queries import SeenQuery
from vllm_kvselect.methods.registry import METHODS, Method
from vllm_kvselect.prefilling.segments import Segments, sparse_segments
from vllm_kvselect.request import planned_config
from vllm_kvselect.retention import Cut, Cuts, cuts
from vllm_kvselect.scoring.h2o import AttentionSums
from vllm_kvselect.scoring.observer import Observer
from vllm_kvselect.turns import with_context


class PendingCut(Protocol):
    """A cut that is being made: a `Packing`."""

    def finish_all(self) -> None:
        """Chooses what is retained, in all layers that wait for it."""


class Phase(Enum):
    """How far a request with a cut has come."""

    PREFILLING = "prefilling"
    """Its cut is not reached, or it has none: all entries are there."""
    SCORED = "scored"
    """Every entry has its score; the choice is made before the next forward pass."""
    PACKED = "packed"
    """What it retains is in the packed blocks; the others are given back."""


@dataclass(eq=False)
class Request:
    """A request in a worker.

    Attributes:
        num_prompt_tokens: Length of its prompt.
        eviction: Its own configuration.
        cuts: Where its entries are dropped.
        cut: The one at the end of its prompt or, once rounds are made, the last of them; None if
            nothing is dropped so far.
        num_computed: Tokens that are computed before the step at hand.
        phase: How far it has come.
        is_counted: Whether it was reported already; a preempted request is packed again.
        num_found: Tokens of it that came with a compressed context, 0 if it found none.
        observer: What has seen its tokens so far; None before the first chunk and once scored.
        received: What its entries have received from queries so far, if rounds add that up; None
            before its prompt is complete.
        packing: The cut that is being made; None before it is reached and once it is made.
        longest_run: The most packed pages that a head of a layer has; None before the first cut.
        num_kept: Entries of the prompt that rounds leave alone, `[num_layers, num_kv_heads]`; None
            before the first round, and if they compete.
        seen: Where the queries are kept that the next round looks through, by position.
        last_counted_round: Position of the last round that was reported: a preempted request makes
            its rounds again.
        segments: The segments of its prompt that are prefilled sparsely, or None.
        sparse: What is kept for them while they are prefilled.
    """

    num_prompt_tokens: int
    eviction: EvictionConfig
    cuts: Cuts
    cut: Cut | None
    num_computed: int = 0
    phase: Phase = Phase.PREFILLING
    is_counted: bool = False
    num_found: int = 0
    observer: Observer | None = None
    packing: PendingCut | None = None
    received: Received | None = None
    longest_run: Arriving | None = None
    num_kept: torch.Tensor | None = None
    seen: dict[int, SeenQuery] = field(default_factory=dict)
    last_counted_round: int = 0
    segments: Segments | None = None
    sparse: SparsePrefill | None = None

    @classmethod
    def planned(
        cls,
        num_prompt_tokens: int,
        block_size: int,
        eviction: EvictionConfig,
        max_tokens: int = 0,
    ) -> Self:
        """Computes where a request drops entries."""
        planned = cuts(num_prompt_tokens, block_size, eviction, max_tokens)
        segments = sparse_segments(num_prompt_tokens, planned, eviction)
        last = planned.last_made(num_prompt_tokens)
        return cls(num_prompt_tokens, eviction, planned, last, segments=segments)

    @property
    def due_round(self) -> Cut | None:
        """The round that has to be made before the step at hand, if there is one."""
        if self.num_computed <= self.num_prompt_tokens:
            return None
        last = self.cuts.last_made(self.num_computed)
        return None if last is self.cut else last

    @property
    def next_round(self) -> Cut | None:
        """The round after the step at hand, if there is one."""
        return self.cuts.next_after(max(self.num_computed, self.num_prompt_tokens))

    @property
    def has_sums(self) -> bool:
        """Whether its rounds need what its entries have received from all queries."""
        return self.method.cumulative and self.cuts[-1].position > self.num_prompt_tokens

    @property
    def num_observed(self) -> int:
        """Tokens at its beginning that its observer has to see: up to its cut, or its prompt's."""
        if self.cut is not None:
            return self.cut.position
        return self.num_prompt_tokens if self.cuts and self.has_sums else 0

    def first_seen(self, cut: Cut) -> int:
        """The first position whose queries the round at a cut looks through."""
        if not self.has_sums:
            return cut.position - self.eviction.window
        return self.num_prompt_tokens if self.received is None else self.received.position

    @property
    def is_behind(self) -> bool:
        """Whether as many queries wait to be added up as other methods keep."""
        return len(self.seen) >= self.eviction.window and self.has_sums and self.due_round is None

    def take_received(self) -> Received:
        """What its entries have received; of a prompt of which nothing was dropped, for good."""
        if self.received is None:
            assert isinstance(self.observer, AttentionSums)
            self.received, self.observer = Received.of_prompt(self.observer.sums), None
        return self.received

    def make_round(self, cut: Cut) -> None:
        """Takes note of a round."""
        self.cut, self.phase = cut, Phase.PACKED
        self.last_counted_round = max(self.last_counted_round, cut.position)
        self.seen.clear()

    @property
    def method(self) -> Method:
        """The request's method; only requests with a cut have one."""
        return METHODS[self.eviction.method]

    @property
    def num_saved_blocks(self) -> int:
        """Blocks that it would hold as well if nothing had been dropped.

        None if it found its context: these blocks would be another's, and are counted there.
        """
        if self.cut is None or self.phase is not Phase.PACKED or self.num_found:
            return 0
        return self.cut.first_packed

    def begin_again(self) -> None:
        """Forgets what was computed: its blocks are gone, and it is prefilled anew."""
        self.phase, self.observer, self.packing = Phase.PREFILLING, None, None
        self.cut, self.sparse = self.cuts.last_made(self.num_prompt_tokens), None
        self.longest_run = self.received = None
        self.seen.clear()

    def begin_at(self, num_computed: int) -> None:
        """Takes note of what it found in the prefix cache: past its cut that is its context."""
        self.num_found = 0
        self.num_computed = num_computed
        if self.cut is not None and num_computed >= self.cut.position:
            self.phase, self.num_found = Phase.PACKED, num_computed

    def observed_by(self, num_layers: int) -> Observer:
        """Its observer, made when its first chunk comes."""
        if self.observer is None:
            make = self.method.observer_class
            self.observer = make(self.num_observed, num_layers, self.eviction)
        return self.observer


RequestsOf = Callable[[CommonAttentionMetadata], list[Request]]
"""Requests of a batch's rows, in the order of the rows."""


class LiveRequests:
    """Follows the scheduler's messages: a request is known from its first step to its end.

    Args:
        eviction: The server's configuration.
        block_size: Tokens per block.
    """

    def __init__(self, eviction: EvictionConfig, block_size: int) -> None:
        self._eviction, self._block_size = eviction, block_size
        self._requests: dict[str, Request] = {}

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def get(self, request_id: str | None) -> Request:
        """A request; one that drops nothing for the rows of a dummy batch."""
        unknown = Request(0, self._eviction, Cuts(), None)
        return self._requests.get(request_id, unknown) if request_id is not None else unknown

    def prefilling(self, scheduled: SchedulerOutput) -> bool:
        """Whether a step computes tokens that the observer of a request has to see.

        Args:
            scheduled: The scheduler's message, which `update` has seen.
        """
        cached = scheduled.scheduled_cached_reqs
        computed = [(new.req_id, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs]
        computed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        return any(
            num_computed < request.num_observed
            for request_id, num_computed in computed
            if (request := self._requests.get(request_id)) is not None
        )

    def update(self, scheduled: SchedulerOutput) -> list[Request]:
        """Takes over what a step's message says of requests that end, pause and begin.

        Returns:
            Those that begin with a context that was compressed before.
        """
        for request_id in scheduled.finished_req_ids:
            self._requests.pop(request_id, None)
        cached = scheduled.scheduled_cached_reqs
        for request_id in (scheduled.preempted_req_ids or set()) | cached.resumed_req_ids:
            if request_id in self._requests:
                self._requests[request_id].begin_again()
        begun = []
        for new in scheduled.scheduled_new_reqs:
            # One that was preempted may come as new again: it is still the same request.
            begun.append(self._requests.setdefault(new.req_id, self._planned(new)))
            begun[-1].begin_at(new.num_computed_tokens)
        for request_id, num_computed in zip(
            cached.req_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in self._requests:
                self._requests[request_id].num_computed = num_computed
            if request_id in cached.resumed_req_ids and request_id in self._requests:
                begun.append(self._requests[request_id])
                begun[-1].begin_at(num_computed)
        return [request for request in begun if request.num_found]

    def finish_packing(self) -> None:
        """Makes the cuts that the last step left, of the requests that still live.

        Nobody has written to their blocks since then: those that the scheduler gave back are
        written in the next forward pass at the earliest.
        """
        for request in self:
            if request.packing is not None:
                request.packing.finish_all()

    @property
    def num_saved_blocks(self) -> int:
        """Blocks that the live requests would hold as well if nothing had been dropped."""
        return sum(request.num_saved_blocks for request in self)

    def _planned(self, new: NewRequestData) -> Request:
        eviction = planned_config(self._eviction, new.sampling_params)
        eviction = with_context(eviction, new.prompt_token_ids, self._block_size)
        num_tokens = length_from_prompt_token_ids_or_embeds(new.prompt_token_ids, new.prompt_embeds)
        params = new.sampling_params
        max_tokens = (params and params.max_tokens) or 0
        return Request.planned(num_tokens, self._block_size, eviction, max_tokens)
