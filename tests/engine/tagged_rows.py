"""Requests of the tagged worker, and what each must retain, by no formula of the package."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
        first_packed: Index of the first packed kernel block.
        tail_start: Index of the first kernel block after the packed ones.
    """

    position: int
    num_freed: int
    first_packed: int
    tail_start: int


class Sizes(NamedTuple):
    """Tokens of a block, and of a kernel block, which are the entries of a page."""

    block: int
    page: int


def retained_in_prompt(
    num_prompt_tokens: int, sizes: Sizes, eviction: EvictionConfig
) -> list[Retained]:
    """The fewest whole blocks that, with the blocks of the window, meet the budget at the end.

    Before it, at each interval that frees more than was free, the budget of what was seen besides
    that interval, which is whole blocks.
    """
    if eviction.method == "none":
        return []
    position = num_prompt_tokens
    if eviction.context is not None:
        # Whole blocks of the context, as far as the prompt has them and a token more.
        position = 0
        while position + sizes.block <= eviction.context and position + sizes.block < (
            num_prompt_tokens
        ):
            position += sizes.block
    step = eviction.prompt_interval
    while step % sizes.block:
        step += 1
    found = []
    for length in (length for length in range(1, position) if step and length % step == 0):
        budget = eviction.budget
        if isinstance(budget, float):
            budget = max(eviction.least, int(np.ceil(budget * length)))
        found.append(_retained(length, sizes, step, budget + step, eviction.num_first))
    budget = eviction.budget
    if isinstance(budget, float):
        budget = int(np.ceil(budget * position))
    made: list[Retained] = []
    of_end = _retained(position, sizes, eviction.window, budget, eviction.num_first)
    for each in (*found, of_end):
        if each and (not made or each.num_freed > made[-1].num_freed):
            made.append(each)
    return made


def retained_in_rounds(
    num_prompt_tokens: int, max_tokens: int, sizes: Sizes, eviction: EvictionConfig
) -> list[Retained]:
    """The same for what is generated: one for each round that frees more than was free before."""
    if eviction.method == "none" or not eviction.decode_budget:
        return []
    in_prompt = retained_in_prompt(num_prompt_tokens, sizes, eviction)
    num_freed = in_prompt[-1].num_freed if in_prompt else 0
    budget, rounds = eviction.decode_budget, []
    for length in range(num_prompt_tokens + 1, num_prompt_tokens + max_tokens):
        if (length - num_prompt_tokens) % eviction.decode_interval:
            continue
        found = _retained(length, sizes, eviction.window, budget, eviction.num_first)
        if found and found.num_freed > num_freed:
            rounds.append(found)
            num_freed = found.num_freed
    return rounds


def _retained(
    position: int, sizes: Sizes, window: int, budget: int, num_first: int
) -> Retained | None:
    tail_start = 0
    while (tail_start + 1) * sizes.page <= position - window:
        tail_start += 1
    first_retained = tail_start - 1
    while first_retained > 0 and position - first_retained * sizes.page < budget:
        first_retained -= 1
    # The first tokens have pages of their own, whatever the budget.
    while (tail_start - first_retained) * sizes.page < num_first:
        first_retained -= 1
    # Pages are packed into whole blocks, before the first block that has any of the tail.
    first_packed = first_retained
    while (first_packed + tail_start - first_retained) * sizes.page % sizes.block:
        first_packed -= 1
    num_freed = 0
    while (num_freed + 1) * sizes.block <= first_packed * sizes.page:
        num_freed += 1
    return Retained(position, num_freed, first_packed, tail_start) if num_freed else None


@dataclass(frozen=True)
class Span:
    """Tokens of a prompt that are prefilled sparsely, in whole segments.

    Attributes:
        start: The first of them.
        end: The token after the last one.
        size: Tokens of a segment.
    """

    start: int
    end: int
    size: int

    def segment(self, index: int) -> range:
        """The segment of a token."""
        first = index - index % self.size
        return range(first, first + self.size)

    def within(self, begin: int, end: int) -> range:
        """The sparse tokens among some."""
        return range(max(begin, self.start), min(end, self.end))


def sparse_span(
    num_prompt_tokens: int, first: Retained | None, eviction: EvictionConfig
) -> Span | None:
    """The segments behind the dense beginning and before the window, if they read less than all."""
    if eviction.prefill == "dense":
        return None
    end = num_prompt_tokens if first is None else min(first.position, num_prompt_tokens)
    size, sparse = eviction.prefill_segment, []
    for start in range(0, end, size):
        is_dense = start < eviction.prefill_dense_until or start <= eviction.prefill_budget
        if not is_dense and start + size <= end - eviction.window:
            sparse.append(start)
    return Span(sparse[0], sparse[-1] + size, size) if sparse else None


class Row:
    """A request as the model runner knows it: its tokens, their tags and its block table."""

    def __init__(
        self, new: NewRequestData, eviction: EvictionConfig, sizes: Sizes, max_len: int
    ) -> None:
        prompt = new.prompt_token_ids or []
        self.request_id, self.num_prompt_tokens = new.req_id, len(prompt)
        self.eviction = eviction
        self.tokens, self._parts = list(prompt), sizes.block // sizes.page
        self.table: list[int] = []
        self.beside: list[int] = []
        self.add_blocks(new.block_ids)
        self.num_computed, self.num_new = new.num_computed_tokens, 0
        self.tags = np.zeros(max_len + 1, dtype=np.int64)
        self.num_tagged = 0
        self.in_prompt = retained_in_prompt(len(prompt), sizes, eviction)
        assert new.sampling_params is not None
        max_tokens = new.sampling_params.max_tokens or 0
        self.rounds = retained_in_rounds(len(prompt), max_tokens, sizes, eviction)
        self.sparse = sparse_span(len(prompt), self.first, eviction)
        self.packed: list[list[np.ndarray]] = []
        self.packed_position = -1

    def add_blocks(self, block_ids: Sequence[list[int]], is_new: bool = False) -> None:
        """Takes further blocks: kernel blocks of those that drop entries, and those beside."""
        if is_new:
            self.table, self.beside = [], []
        own, *beside = block_ids
        self.table += [
            block_id * self._parts + part for block_id in own for part in range(self._parts)
        ]
        for blocks in beside:
            self.beside += blocks

    def swap(self, fresh: Sequence[int]) -> None:
        """Takes fresh blocks in the places of those before the tail, at the cut that is due."""
        assert self.retained
        first = self.retained.num_freed * self._parts
        blocks = [block * self._parts + part for block in fresh for part in range(self._parts)]
        self.table[first : first + len(blocks)] = blocks

    @property
    def retained(self) -> Retained | None:
        """What its next tokens read of the earlier ones."""
        made = [each for each in self.cuts if each.position <= self.num_computed]
        return made[-1] if made else None

    @property
    def cuts(self) -> list[Retained]:
        """All cuts that it makes, in order."""
        return [*self.in_prompt, *self.rounds]

    @property
    def first(self) -> Retained | None:
        """What is retained when something is dropped for the first time."""
        return next(iter(self.cuts), None)

    def settings(self, index: int) -> tuple[object, ...]:
        """What others must share to read the same as a token at an index, besides its tokens.

        Nobody does behind a cut that is not inside the prompt.
        """
        made = [each.position for each in self.cuts if each.position <= index]
        if not made:
            return ()
        if made[-1] >= self.num_prompt_tokens:
            return (self.request_id, *made)
        eviction = self.eviction
        budget = repr(eviction.budget), eviction.least, eviction.prompt_interval
        return (eviction.method, *budget, *made)

    def identity(self, position: int) -> tuple[object, ...]:
        """What a cut retains, and how."""
        return (int(self.tags[position - 1]), *self.settings(position))

    @property
    def seq_len(self) -> int:
        return self.num_computed + self.num_new

    @property
    def sparse_tokens(self) -> range:
        """The tokens of its chunk that are prefilled sparsely."""
        if self.sparse is None:
            return range(0)
        return self.sparse.within(self.num_computed, self.seq_len)
