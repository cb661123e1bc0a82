"""Requests of the tagged worker, and what each must retain, by no formula of the package."""

from dataclasses import dataclass

import numpy as np
from vllm.v1.core.sched.output import NewRequestData

from vllm_kvselect.config import EvictionConfig


class WrongEntryError(AssertionError):
    """A request read something other than its own entries."""


def require(condition: object, *explanation: object) -> None:
    if not condition:
        raise WrongEntryError(" ".join(map(str, explanation)))


@dataclass(frozen=True)
class Retained:
    """What a request must retain, found by counting blocks and not by the package's formulas.

    Attributes:
        position: Tokens that read everything; those after them read what is retained.
        num_freed: Blocks freed then.
        tail_start: Index of the first block after the packed ones.
    """

    position: int
    num_freed: int
    tail_start: int


def retained_blocks(
    num_prompt_tokens: int, block_size: int, eviction: EvictionConfig
) -> Retained | None:
    """The fewest whole blocks that, with the blocks of the window, meet the budget."""
    if eviction.method == "none":
        return None
    position = num_prompt_tokens
    if eviction.context is not None:
        # Whole blocks of the context, as far as the prompt has them.
        position = 0
        while position + block_size <= min(eviction.context, num_prompt_tokens):
            position += block_size
    budget = eviction.budget
    if isinstance(budget, float):
        budget = int(np.ceil(budget * position))
    return _retained(position, block_size, eviction.window, budget)


def retained_in_rounds(
    num_prompt_tokens: int, max_tokens: int, block_size: int, eviction: EvictionConfig
) -> list[Retained]:
    """The same for what is generated: one for each round that frees more than was free before."""
    if eviction.method == "none" or not eviction.decode_budget:
        return []
    at_prompt = retained_blocks(num_prompt_tokens, block_size, eviction)
    num_freed = at_prompt.num_freed if at_prompt else 0
    budget, rounds = eviction.decode_budget, []
    if eviction.keep_prompt:
        for _ in range(num_freed * block_size, num_prompt_tokens, block_size):
            budget += block_size
    for length in range(num_prompt_tokens + 1, num_prompt_tokens + max_tokens):
        if (length - num_prompt_tokens) % eviction.decode_interval:
            continue
        found = _retained(length, block_size, eviction.window, budget)
        if found and found.num_freed > num_freed:
            rounds.append(found)
            num_freed = found.num_freed
    return rounds


def _retained(position: int, block_size: int, window: int, budget: int) -> Retained | None:
    tail_start = 0
    while (tail_start + 1) * block_size <= position - window:
        tail_start += 1
    first_retained = tail_start - 1
    while first_retained > 0 and position - first_retained * block_size < budget:
        first_retained -= 1
    if first_retained <= 0:
        return None
    return Retained(position, first_retained, tail_start)


class Row:
    """A request as the model runner knows it: its tokens, their tags and its block table."""

    def __init__(
        self, new: NewRequestData, eviction: EvictionConfig, block_size: int, max_len: int
    ) -> None:
        prompt = new.prompt_token_ids or []
        self.request_id, self.num_prompt_tokens = new.req_id, len(prompt)
        self.eviction = eviction
        self.tokens, self.table = list(prompt), list(new.block_ids[0])
        self.num_computed, self.num_new = new.num_computed_tokens, 0
        self.tags = np.zeros(max_len + 1, dtype=np.int64)
        self.num_tagged = 0
        self.at_prompt = retained_blocks(len(prompt), block_size, eviction)
        assert new.sampling_params is not None
        max_tokens = new.sampling_params.max_tokens or 0
        self.rounds = retained_in_rounds(len(prompt), max_tokens, block_size, eviction)
        self.packed: list[list[np.ndarray]] = []
        self.kept: dict[tuple[int, int], np.ndarray] = {}
        self.packed_position = -1

    @property
    def retained(self) -> Retained | None:
        """What its next tokens read of the earlier ones."""
        made = [each for each in self.rounds if each.position <= self.num_computed]
        return made[-1] if made else self.at_prompt

    @property
    def first(self) -> Retained | None:
        """What is retained when something is dropped for the first time."""
        return next(iter([self.at_prompt] if self.at_prompt else self.rounds), None)

    @property
    def settings(self) -> tuple[object, ...]:
        """What others must share to read what is retained of it: nobody does without a context."""
        assert self.retained is not None
        if self.eviction.context is None:
            return (self.request_id,)
        return (self.eviction.method, repr(self.eviction.budget), self.retained.position)

    @property
    def context(self) -> tuple[object, ...]:
        """What is compressed, and how."""
        assert self.retained is not None
        return (int(self.tags[self.retained.position - 1]), *self.settings)

    @property
    def seq_len(self) -> int:
        return self.num_computed + self.num_new

    @property
    def stock_len(self) -> int:
        """Tokens whose attention reads the whole cache."""
        return min(self.seq_len, self.retained.position) if self.retained else self.seq_len
