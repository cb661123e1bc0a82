"""Whether a server dropped what it was asked to: a score on a full cache must not be reported."""

import time
from dataclasses import dataclass
from typing import Self

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.planning.plan import plan
from vllm_kvselect.top import Snapshot, TopError

_SECONDS = 10.0
"""How long the metrics may lag behind the answers."""


@dataclass(frozen=True)
class Dropped:
    """Prompts that had entries dropped, and the blocks that they gave back."""

    prompts: int = 0
    blocks: int = 0

    def __add__(self, other: Self) -> "Dropped":
        return Dropped(self.prompts + other.prompts, self.blocks + other.blocks)

    def is_within(self, least: "Dropped", most: "Dropped") -> bool:
        """Whether both counts are."""
        return (
            least.prompts <= self.prompts <= most.prompts
            and least.blocks <= self.blocks <= most.blocks
        )

    def __str__(self) -> str:
        return f"{self.prompts} prompts ({self.blocks} blocks)"


class CutCheck:
    """Compares what a server's metrics count with the cuts of the requests that were sent to it.

    Raises:
        EvaluationError: If it does not answer, or evicts nothing at all.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._before = before = self._fetch()
        if not before.evicts:
            raise EvaluationError(
                f"{url} runs without --kv-eviction: every method would be measured on the full "
                "cache; start it with --kv-eviction none --kv-eviction-allow-override method,budget"
            )
        self.block_size = before.block_size
        self._num_answered = 0
        self._least = self._most = Dropped()

    def note(self, num_prompt_tokens: int, num_tokens: int, eviction: EvictionConfig) -> None:
        """Takes note of an answer to a request with these settings."""
        self._num_answered += 1
        # Of a context that another request compressed, the same is gone, and counted apart.
        made = plan(eviction, None, None, num_prompt_tokens, self.block_size)
        num_freed = made.cuts.num_freed(num_prompt_tokens)
        if not num_freed:
            return
        due = Dropped(1, num_freed)
        self._most += due
        # A request that ends with its first token may be over before it is packed.
        if num_tokens > 1 or eviction.context is not None:
            self._least += due

    def check(self) -> None:
        """Compares, once no request is under way.

        Raises:
            EvaluationError: If others used the server meanwhile, or other cuts were made than those
                that were due.
        """
        deadline = time.monotonic() + _SECONDS
        while not self._is_as_noted(now := self._fetch()) and time.monotonic() < deadline:
            time.sleep(0.1)
        num_answered = now.num_answered - self._before.num_answered
        if num_answered != self._num_answered:
            raise EvaluationError(
                f"{self._url} answered {num_answered} requests, {self._num_answered} of them for "
                "this evaluation, so it cannot be seen whose entries were dropped; take a server "
                "that nobody else uses"
            )
        if not self._is_as_noted(now):
            due = str(self._most)
            if self._least != self._most:
                due = f"{self._least} to {due}"
            raise EvaluationError(
                f"{self._url} dropped entries of {self._dropped(now)} where {due} were due: what "
                "it answered is not what the methods would, and is not reported; see that its "
                "window is the one given here with --set, and read its log"
            )

    def _is_as_noted(self, now: Snapshot) -> bool:
        num_answered = now.num_answered - self._before.num_answered
        return num_answered == self._num_answered and self._dropped(now).is_within(
            self._least, self._most
        )

    def _dropped(self, now: Snapshot) -> Dropped:
        before, after = (
            Dropped(int(each["requests"]), int(each["freed_blocks"]))
            + Dropped(int(each["state_hits"]), int(each["state_blocks"]))
            for each in (self._before.eviction, now.eviction)
        )
        return Dropped(after.prompts - before.prompts, after.blocks - before.blocks)

    def _fetch(self) -> Snapshot:
        try:
            return Snapshot.fetch(self._url)
        except TopError as error:
            raise EvaluationError(str(error)) from None
