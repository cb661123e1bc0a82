"""Layers that choose nothing: a drafter's, which retain what layers of their target do."""

from collections.abc import Sequence

import torch

from vllm_kvselect.scoring.inputs import absent_columns
from vllm_kvselect.selecting.ranking import Candidates


def followed_layers(num_choosing: int, num_following: int) -> list[int]:
    """The layers that a drafter's layers follow: those at the same depth.

    A drafter of one layer, as EAGLE's, follows the last one, which is the nearest to the logits
    that it imitates. One with as many layers as its target follows each.

    Returns:
        An index from 0 to `num_choosing - 1` for each of the drafter's layers, ascending.
    """
    depths = range(1, num_following + 1)
    return [(depth * num_choosing - 1) // num_following for depth in depths]


def following_candidates(
    stacked: Candidates,
    followed: Sequence[int],
    packed: Candidates | None,
    num_absent: torch.Tensor | None,
    num_packed: int,
) -> Candidates:
    """What competes in layers that follow others and share their pages among themselves.

    After one cut they hold other entries than the layers that they follow. What is new is scored
    as there; what is packed keeps what it was scored when it was chosen.

    Args:
        stacked: Candidates of the layers that choose, `[num_layers, num_kv_heads, num_tokens]`.
        followed: The layers that are followed.
        packed: Numbers of what these hold packed, layer by layer and head by head, `[n]` each;
            None if nothing was dropped before.
        num_absent: First columns of each of their heads without an entry, `[num_following,
            num_kv_heads]`; None likewise.
        num_packed: Columns of packed entries.

    Returns:
        `[num_following, num_kv_heads, num_tokens]` each.
    """
    found = stacked.of_layers(followed)
    if packed is None or num_absent is None:
        return found
    is_packed = ~absent_columns(num_absent, num_packed)
    for part, numbers in zip(found[:3], packed[:3], strict=True):
        if part is not None and numbers is not None:
            kept = torch.zeros_like(part[..., :num_packed])
            part[..., :num_packed] = kept.masked_scatter_(is_packed, numbers)
    return found._replace(num_absent=num_absent)
