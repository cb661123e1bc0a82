"""Cuts: at which lengths a request drops entries, and what becomes of its blocks then.

Scheduler and workers compute them independently from the prompt's length, the longest answer and
the configuration, so they agree without a message. They never depend on scores. All cuts of a
request together are its retention plan: one at the end of its prompt, and *rounds* while it
generates.
"""

from bisect import bisect_right
from dataclasses import dataclass
from enum import Enum
from math import ceil
from operator import attrgetter

from vllm_kvselect.config import EvictionConfig


class Role(Enum):
    """What a cut makes of a block, by the block's place in the request's block table."""

    FREED = "freed"
    """Given back to vLLM's block pool, its hash intact."""
    PACKED = "packed"
    """Overwritten with retained entries."""
    TAIL = "tail"
    """Left as it is: it holds the latest entries, and takes those of the tokens to come."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One moment at which a request drops entries.

    Attributes:
        position: Tokens of the request that are computed before it. They read all entries that are
            there until then; later tokens read what the cut retains, and the tail.
        first_packed: Index of the first packed block in the request's block table. Those before it
            are freed.
        num_packed: Number of packed blocks, at least 1.
        tail_start: Index of the first tail block, `first_packed + num_packed`.
    """

    position: int
    first_packed: int
    num_packed: int
    tail_start: int

    def role(self, block_index: int) -> Role:
        """What it makes of a block of the block table."""
        if block_index < self.first_packed:
            return Role.FREED
        return Role.PACKED if block_index < self.tail_start else Role.TAIL


class Cuts(tuple[Cut, ...]):
    """All cuts of a request, in order; none if it is stock.

    Who wants to know about a block or a length asks here, and does not assume how many cuts there
    are or where they lie.
    """

    __slots__ = ()

    def num_made(self, num_tokens: int) -> int:
        """How many cuts are made once `num_tokens` are computed."""
        return bisect_right(self, num_tokens, key=attrgetter("position"))

    def next_after(self, num_tokens: int) -> Cut | None:
        """The first cut that is not yet made when `num_tokens` are computed, if there is one."""
        num_made = self.num_made(num_tokens)
        return self[num_made] if num_made < len(self) else None

    def last_made(self, num_tokens: int) -> Cut | None:
        """The last cut that is made once `num_tokens` are computed, if there is one."""
        num_made = self.num_made(num_tokens)
        return self[num_made - 1] if num_made else None

    def role(self, block_index: int, num_tokens: int) -> Role:
        """What a block is for once `num_tokens` are computed; before every cut all are tail."""
        cut = self.last_made(num_tokens)
        return Role.TAIL if cut is None else cut.role(block_index)

    def num_freed(self, num_tokens: int) -> int:
        """Blocks that are freed once `num_tokens` are computed: so many from the first one on."""
        cut = self.last_made(num_tokens)
        return 0 if cut is None else cut.first_packed

    def is_private(self, block_index: int) -> bool:
        """Whether a block may belong to this request only, from its first token on.

        Such a block is neither hashed nor taken from the prefix cache. The first cut does not just
        free it: either it is overwritten, or it may hold entries computed when others had been
        dropped.
        """
        return bool(self) and block_index >= self.first_private

    @property
    def first_private(self) -> int:
        """Index of the first private block; all from there on are. There must be a cut."""
        return self[0].first_packed

    @property
    def first_position(self) -> int:
        """Tokens that are computed before anything is dropped. There must be a cut."""
        return self[0].position


def cuts(
    num_prompt_tokens: int, block_size: int, config: EvictionConfig, max_tokens: int = 0
) -> Cuts:
    """Computes all cuts of a request, those that free anything.

    One lies at the prompt's end or, where a context is marked, at the last block border in it.
    Rounds follow at every `decode_interval` tokens past the prompt, as soon as there is more than
    the `decode_budget`. With `keep_prompt` the blocks that the prompt holds come on top of it.

    Args:
        num_prompt_tokens: Length of the prompt in tokens.
        block_size: Tokens per block.
        config: The request's configuration; only `method`, `budget`, `window`, `context`,
            `decode_budget`, `decode_interval` and `keep_prompt` matter here.
        max_tokens: Tokens that the request may generate.

    Returns:
        The cuts, none when nothing would be freed.
    """
    if not config.enabled:
        return Cuts()
    position = num_prompt_tokens
    if config.context is not None:
        assert config.context != "chat"  # `turns.with_context` has put a number there
        position = min(config.context, num_prompt_tokens) // block_size * block_size
    entries = budget_entries(position, config)
    first = _cut_at(position, block_size, config.window, entries)
    made = [] if first is None else [first]
    if not config.decode_budget:
        return Cuts(made)
    step, budget = config.decode_interval, config.decode_budget
    if config.keep_prompt:
        num_freed = first.first_packed if first else 0
        budget += (ceil(num_prompt_tokens / block_size) - num_freed) * block_size
    for position in range(num_prompt_tokens + step, num_prompt_tokens + max_tokens, step):
        cut = _cut_at(position, block_size, config.window, budget)
        if cut is not None and cut.first_packed > (made[-1].first_packed if made else 0):
            made.append(cut)
    return Cuts(made)


def _cut_at(position: int, block_size: int, window: int, entries: int) -> Cut | None:
    """The cut at a length in tokens, or None if it would free nothing.

    The budget, in entries, is met in whole blocks, rounded up: less is never retained than was
    asked for.
    """
    tail_start = (position - window) // block_size
    num_tail_entries = position - tail_start * block_size
    num_packed = max(1, -((num_tail_entries - entries) // block_size))
    if tail_start <= num_packed:
        return None
    return Cut(position, tail_start - num_packed, num_packed, tail_start)


def budget_entries(num_prompt_tokens: int, config: EvictionConfig) -> int:
    """Returns the budget of a prompt in entries per KV head per layer."""
    if isinstance(config.budget, float):
        return ceil(config.budget * num_prompt_tokens)
    return config.budget


def budget_problem(max_prompt_tokens: int, block_size: int, config: EvictionConfig) -> str | None:
    """Says why a budget or an interval is too small for an engine, and what is needed, or None.

    Args:
        max_prompt_tokens: Length of the longest prompt, of which a fraction must be enough.
        block_size: Tokens per block.
        config: The configuration.
    """
    least, entries = config.window + block_size, budget_entries(max_prompt_tokens, config)
    if 0 < config.decode_budget < least:
        return (
            f"decode_budget = {config.decode_budget} is too small: at least {least} are needed, "
            f"the window of {config.window} and one block of {block_size}"
        )
    if config.decode_budget and config.decode_interval < max(block_size, config.window):
        return (
            f"decode_interval = {config.decode_interval} is too short: at least "
            f"{max(block_size, config.window)} are needed, a block of {block_size} and the window "
            f"of {config.window}"
        )
    if entries >= least:
        return None
    return (
        f"budget = {config.budget!r} retains {entries} entries of {max_prompt_tokens} tokens; at "
        f"least {least} are needed, the window of {config.window} and one block of {block_size}"
    )
