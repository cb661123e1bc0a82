"""Cuts: at which lengths a request drops entries, and what becomes of its blocks then.

Scheduler and workers compute them independently from the prompt's length, the longest answer and
the configuration, so they agree without a message. They never depend on scores. All cuts of a
request together are its retention plan: some in its prompt, one at the prompt's end, and *rounds*
while it generates.
"""

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil
from operator import attrgetter

from vllm_kvselect.config import EvictionConfig


@dataclass(frozen=True, slots=True)
class Cut:
    """One moment at which a request drops entries, between two steps.

    What is retained is packed into fresh blocks, which take the places of the last blocks before
    the tail; all others before it are freed. Entries are packed by kernel blocks, which hold a page
    of each head. Where a block has several, the first packed block may begin with some that are not
    used, and the first one of the tail with some that are not read any more.

    Attributes:
        position: Tokens of the request that are computed before it. They read all entries that are
            there until then; later tokens read what the cut retains, and the tail.
        first_packed: Index of the first packed kernel block in the request's kernel block table.
        num_packed: Number of packed kernel blocks, at least 1.
        tail_start: Index of the first kernel block of the tail.
        per_block: Kernel blocks of a block.
    """

    position: int
    first_packed: int
    num_packed: int
    tail_start: int
    per_block: int = 1

    @property
    def num_freed(self) -> int:
        """Blocks that are freed: so many from the first one of the block table on."""
        return self.first_packed // self.per_block

    @property
    def first_of_tail(self) -> int:
        """Index of the first block that is left as it is: packed ones end with whole blocks."""
        return self.tail_start // self.per_block

    @property
    def num_dropped(self) -> int:
        """Pages of each head whose entries are dropped, of whichever heads they are."""
        return self.tail_start - self.num_packed


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

    def num_freed(self, num_tokens: int) -> int:
        """Blocks that are freed once `num_tokens` are computed: so many from the first one on."""
        cut = self.last_made(num_tokens)
        return 0 if cut is None else cut.num_freed

    @property
    def first_position(self) -> int:
        """Tokens that are computed before anything is dropped. There must be a cut."""
        return self[0].position

    def most_found(self, block_size: int, window: int, num_made: int = 0) -> int:
        """Tokens that a request may take from the prefix cache at most, before its next cut.

        A block and all queries that the cut looks through are left to be computed: so cuts are made
        of requests that run. There must be a cut that is not made. `num_made` cuts are made of what
        is found.
        """
        position = self[num_made].position
        blocks = min(position // block_size - 1, (position - window) // block_size)
        return max(0, blocks) * block_size

    def most_held(self, num_tokens: int, block_size: int, num_ahead: int = 0) -> int:
        """The most blocks that a request holds until `num_tokens` are computed.

        For `num_ahead` of these there are blocks before they are computed: a drafter writes there.
        """
        made = [cut for cut in self if cut.position < num_tokens]
        ends = [min(num_tokens, cut.position + num_ahead) for cut in made] + [num_tokens]
        freed = [0] + [cut.num_freed for cut in made]
        return max(ceil(end / block_size) - gone for end, gone in zip(ends, freed, strict=True))


def cuts(
    num_prompt_tokens: int,
    block_size: int,
    config: EvictionConfig,
    max_tokens: int = 0,
    page_size: int | None = None,
) -> Cuts:
    """Computes all cuts of a request, those that free anything.

    One lies at the prompt's end or, where a context is marked, at the last block border in it that
    at least one token of the prompt follows: so the request goes on, and the cut is made. With
    a `prompt_interval`, in whole blocks, others lie before it at every multiple: they retain the
    budget of what stands before the latest interval, which is left as it is. What they retain does
    not depend on what follows: a fraction is one of the tokens before the cut.
    Rounds follow at every `decode_interval` tokens past the prompt, as soon as there is more than
    the `decode_budget`.

    Args:
        num_prompt_tokens: Length of the prompt in tokens.
        block_size: Tokens per block.
        config: The request's configuration; only `method`, `budget`, `least`, `window`, `context`,
            `prompt_interval`, `keep_first`, `decode_budget` and `decode_interval` matter here.
        max_tokens: Tokens that the request may generate.
        page_size: Entries per page, of which a block has one or several; None for one.
    """
    if not config.enabled:
        return Cuts()
    end = num_prompt_tokens
    if config.context is not None:
        end = min(config.context, num_prompt_tokens - 1) // block_size * block_size
    # A position, the latest tokens that do not compete there, and the entries retained with them.
    wanted = []
    if step := whole_interval(config, block_size):
        for position in range(step, end, step):
            entries = max(least_entries(config), budget_entries(position, config))
            wanted.append((position, step, entries + step))
    wanted.append((end, config.window, budget_entries(end, config)))
    if config.decode_budget:
        begin, step = num_prompt_tokens, config.decode_interval
        of_rounds = range(begin + step, begin + max_tokens, step)
        wanted += [(position, config.window, config.decode_budget) for position in of_rounds]
    made: list[Cut] = []
    per_page = page_size or block_size
    least = first_pages(config, per_page)
    for position, num_latest, num_entries in wanted:
        cut = _cut_at(position, block_size, per_page, num_latest, num_entries, least)
        if cut is not None and cut.num_freed > (made[-1].num_freed if made else 0):
            made.append(cut)
    return Cuts(made)


def chunk_end(begin: int, end: int, cut: Cut, window: int, tokens_in_graph: int = 0) -> int:
    """Where a chunk of a request ends, which would come to `end` if there were no cut.

    Chunks end at cuts. Nobody sees the queries of a step that runs as one graph, and cuts look
    through some: so no chunk that holds tokens of the window is as short as a request's part of a
    graph, nor leaves one that is. `tokens_in_graph` are those of a request in a graph of a whole
    step; 0 without such graphs.

    Returns:
        The position; `begin` if the request has to wait for a larger step. One with room for `2 *
        tokens_in_graph + 1` tokens is always large enough.
    """
    if end >= cut.position:
        return cut.position
    if not tokens_in_graph:
        return end
    end = min(end, cut.position - tokens_in_graph - 1)
    first_query = cut.position - window
    if end > first_query and end - begin <= tokens_in_graph:
        end = first_query
    return max(begin, end)


def _cut_at(
    position: int, block_size: int, page_size: int, window: int, entries: int, least: int
) -> Cut | None:
    """The cut at a length in tokens, or None if it would free nothing.

    The budget, in entries, is met in whole pages, rounded up: less is never retained than was asked
    for, nor less than `least` packed pages. The last `window` tokens do not compete, and count.
    """
    tail_start, per_block = (position - window) // page_size, block_size // page_size
    num_tail_entries = position - tail_start * page_size
    num_packed = max(least, -((num_tail_entries - entries) // page_size))
    first_packed = tail_start // per_block * per_block - num_packed
    cut = Cut(position, first_packed, num_packed, tail_start, per_block)
    return cut if cut.num_freed > 0 else None


def first_pages(config: EvictionConfig, page_size: int) -> int:
    """Pages that each head keeps at least, the first tokens in them."""
    return max(1, ceil(config.num_first / page_size))


def whole_interval(config: EvictionConfig, block_size: int) -> int:
    """The `prompt_interval` in tokens: whole blocks, so that what is cut there can be found."""
    return ceil(config.prompt_interval / block_size) * block_size


def least_entries(config: EvictionConfig) -> int:
    """Entries that cuts in a prompt retain at least: a number is taken at its word."""
    return config.least if isinstance(config.budget, float) else 0


def budget_entries(num_prompt_tokens: int, config: EvictionConfig) -> int:
    """Returns the budget of a prompt in entries per KV head per layer."""
    if isinstance(config.budget, float):
        return ceil(config.budget * num_prompt_tokens)
    return config.budget


def most_blocks(
    max_tokens: int, block_size: int, config: EvictionConfig, num_ahead: int = 0
) -> int:
    """The most blocks that any request with this configuration holds.

    What is held grows from one cut to the next. It is bounded where prompts are cut while they are
    computed and answers while they are generated. `num_ahead` is as of `Cuts.most_held`.
    """
    whole = ceil(max_tokens / block_size)
    if not (config.enabled and config.prompt_interval and config.decode_budget):
        return whole
    step = whole_interval(config, block_size)
    entries = max(least_entries(config), budget_entries(max_tokens, config))
    entries = max(entries, first_pages(config, block_size) * block_size)
    of_rounds = max(entries, config.decode_budget) + config.decode_interval
    # A cut in a prompt leaves the budget and an interval.
    at_once = max(entries + 2 * step, of_rounds) + num_ahead
    # Two blocks may be filled by one entry each, whatever a page is; where a block has several
    # pages, so may the first of the tail.
    return min(whole, (at_once + 3 * (block_size - 1)) // block_size)


def budget_problem(max_prompt_tokens: int, page_size: int, config: EvictionConfig) -> str | None:
    """Says why a budget or an interval is too small for an engine, and what is needed, or None.

    A fraction must be enough of the longest prompt.
    """
    pages, entries = first_pages(config, page_size), budget_entries(max_prompt_tokens, config)
    least = config.window + pages * page_size
    if 0 < config.decode_budget < least:
        return (
            f"decode_budget = {config.decode_budget} is too small: at least {least} are needed, "
            f"the window of {config.window} and {pages} page(s) of {page_size}"
        )
    shortest = max(page_size, config.window)
    for name, interval in (
        ("decode_interval", config.decode_interval if config.decode_budget else shortest),
        ("prompt_interval", config.prompt_interval or shortest),
    ):
        if interval < shortest:
            return (
                f"{name} = {interval} is too short: at least {shortest} are needed, a page of "
                f"{page_size} and the window of {config.window}"
            )
    if entries >= least:
        return None
    return (
        f"budget = {config.budget!r} retains {entries} entries of {max_prompt_tokens} tokens; "
        f"at least {least} are needed, "
        f"the window of {config.window} and {pages} page(s) of {page_size}"
    )
