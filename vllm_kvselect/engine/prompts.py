"""Prompts of the requests that live in a worker, each with its own settings and cut."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Self

import torch
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.request import planned_config
from vllm_kvselect.retention import Cut, cuts


@dataclass(eq=False)
class Prompt:
    """A request's prompt.

    Attributes:
        num_tokens: Length of the prompt.
        eviction: The request's own configuration.
        cut: Where its entries are dropped, or None.
        is_packed: Whether its entries are packed now and the other blocks given back.
        is_counted: Whether it was reported already; a preempted prompt is packed again.
        sums: Scores of the chunks so far, where the method needs the queries of the whole prompt:
            `[num_layers, num_kv_heads, num_tokens]` float32. None before the first chunk and once
            the prompt is packed.
        num_summed: Tokens whose queries are in the sums.
        packing: What is left to do to pack it before the next step, in order.
    """

    num_tokens: int
    eviction: EvictionConfig
    cut: Cut | None
    is_packed: bool = False
    is_counted: bool = False
    sums: torch.Tensor | None = None
    num_summed: int = 0
    packing: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def planned(cls, num_tokens: int, block_size: int, eviction: EvictionConfig) -> Self:
        """Plans a prompt of `num_tokens`."""
        cut = cuts(num_tokens, block_size, eviction).last_made(num_tokens)
        return cls(num_tokens, eviction, cut)


PromptsOf = Callable[[CommonAttentionMetadata], list[Prompt]]
"""Prompts of a batch's rows, in the order of the rows."""


class LivePrompts:
    """Follows the scheduler's messages, so that every request's prompt is known while it lives.

    Args:
        eviction: The server's configuration.
        block_size: Tokens per block.
    """

    def __init__(self, eviction: EvictionConfig, block_size: int) -> None:
        self._eviction, self._block_size = eviction, block_size
        self._prompts: dict[str, Prompt] = {}

    def __getitem__(self, request_id: str) -> Prompt:
        return self._prompts[request_id]

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts.values())

    def get(self, request_id: str | None) -> Prompt:
        """A request's prompt; one that drops nothing for the rows of a dummy batch."""
        unknown = Prompt(0, self._eviction, None)
        return self._prompts.get(request_id, unknown) if request_id is not None else unknown

    def prefilling(self, scheduled: SchedulerOutput) -> bool:
        """Whether a step computes tokens that come before a cut.

        Args:
            scheduled: The scheduler's message, which `update` has seen.
        """
        cached = scheduled.scheduled_cached_reqs
        computed = [(new.req_id, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs]
        computed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        return any(
            prompt.cut is not None and num_computed < prompt.cut.position
            for request_id, num_computed in computed
            if (prompt := self._prompts.get(request_id)) is not None
        )

    def update(self, scheduled: SchedulerOutput) -> None:
        """Takes over what a step's message says of requests that end, pause and begin."""
        for request_id in scheduled.finished_req_ids:
            self._prompts.pop(request_id, None)
        resumed = scheduled.scheduled_cached_reqs.resumed_req_ids
        for request_id in (scheduled.preempted_req_ids or set()) | resumed:
            if request_id in self._prompts:
                prompt = self._prompts[request_id]
                prompt.is_packed, prompt.sums = False, None
                prompt.packing.clear()  # its blocks are gone
        for request in scheduled.scheduled_new_reqs:
            # One that was preempted may come as new again: it is still the same prompt.
            self._prompts.setdefault(request.req_id, self._planned(request))

    def finish_packing(self) -> None:
        """Packs what the last step left, of the requests that still live.

        Nobody has written to a prompt's blocks since then: those that the scheduler gave back are
        written in the next forward pass at the earliest.
        """
        for prompt in self._prompts.values():
            for pack in prompt.packing:
                pack()
            prompt.packing.clear()

    @property
    def num_saved_blocks(self) -> int:
        """Blocks that the live requests would hold as well if nothing had been dropped."""
        made = (prompt.cut for prompt in self._prompts.values() if prompt.is_packed)
        return sum(cut.first_packed for cut in made if cut)

    def _planned(self, request: NewRequestData) -> Prompt:
        params = request.sampling_params
        eviction = planned_config(self._eviction, params.extra_args if params else None)
        num_tokens = length_from_prompt_token_ids_or_embeds(
            request.prompt_token_ids, request.prompt_embeds
        )
        return Prompt.planned(num_tokens, self._block_size, eviction)
