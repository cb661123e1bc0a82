"""Chats as contexts: which part of one is compressed, found in its token ids.

A chat grows by turns, and is sent anew with each. Its context must not grow with it, or every turn
would compress for itself. So it is what stands before the first user's turn that leaves something
to drop, such as the one after a long system prompt. All later turns have the same.
"""

from collections.abc import Iterator, Sequence

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.planning.cuts import cuts


def with_context(
    config: EvictionConfig,
    token_ids: Sequence[int] | None,
    block_size: int,
    page_size: int | None = None,
) -> EvictionConfig:
    """Puts a number of tokens in place of `context = "chat"`.

    Args:
        config: A request's configuration.
        token_ids: Its prompt; None if that is not made of tokens.
        block_size: Tokens per block.
        page_size: As of `cuts`.

    Returns:
        The configuration, with the method `none` if there is nothing to drop yet. As it is if its
        context is a number already, or not marked.
    """
    if config.context != "chat" or not config.enabled:
        return config
    num_tokens = len(token_ids or ())
    for start in turns(token_ids or (), config.turn_start):
        marked = config.model_copy(update={"context": start})
        if start and cuts(num_tokens, block_size, marked, page_size=page_size):
            return marked
    return config.model_copy(update={"method": "none", "context": None})


def turns(token_ids: Sequence[int], turn_start: Sequence[int]) -> Iterator[int]:
    """Positions at which users' turns begin.

    Args:
        token_ids: The prompt.
        turn_start: Token ids with which a turn begins.

    Yields:
        The positions, ascending; none without `turn_start`.
    """
    tokens, start = list(token_ids), list(turn_start)
    position = 0
    while start:
        try:
            position = tokens.index(start[0], position)
        except ValueError:
            return
        if tokens[position : position + len(start)] == start:
            yield position
        position += 1
