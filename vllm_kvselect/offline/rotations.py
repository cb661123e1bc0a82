"""How a model rotates the queries and keys of each layer, found by use.

A token alone attends to itself, wherever it stands, so nothing but the rotation can tell its
queries at one position from those at another. Cosines and sines are taken from whatever module
makes two tables of positions, and a layer's are those that account for the difference.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm_kvselect.offline.attention import attention_replaced, causal_attention
from vllm_kvselect.scoring.rotation import Rotation, explains

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, `[..., size]`."""


@dataclass(frozen=True)
class UnknownRotation:
    """Stands for a rotation that was not found, and says why."""

    reason: str


LayerRotation = Rotation | UnknownRotation | None
"""None where a layer does not rotate."""


@torch.no_grad()
def find_rotations(model: "PreTrainedModel", token_ids: list[int]) -> dict[int, LayerRotation]:
    """Finds the rotation of every layer that attends through transformers' registry.

    A rotation that depends on the number of tokens, and would be another one with more, is not
    found.

    Returns:
        By layer; layers are missing where the model takes no positions. Tables reach to the last
        position that the model is made for.
    """
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        return {}
    num_tokens = len(token_ids)
    positions = sorted({0, 1, num_tokens // 2, num_tokens - 1})
    some = token_ids[:: -(-num_tokens // 4)]  # one, such as padding, may be all zeros
    position_ids, rows = (
        part.to(model.device).reshape(-1, 1)
        for part in torch.meshgrid(torch.tensor(positions), torch.tensor(some), indexing="ij")
    )
    rotated: dict[int, list[torch.Tensor]] = {}

    def record(
        index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        # [num_positions * num_tokens, heads, 1, head_size]
        by_position = (len(positions), -1, query.shape[-1])
        rotated[index] = [query.reshape(by_position), key.reshape(by_position)]
        return causal_attention(query, key, value, scale)

    with attention_replaced(model, record), _tables_noted(model, position_ids) as makers:
        model.base_model(rows, position_ids=position_ids, use_cache=False)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", 0)
    every_position = torch.arange(max(limit, num_tokens + 1), device=model.device)[None]
    readings = [each for make in makers for each in _readings(*make(every_position))]
    return {index: _fitting(readings, both, positions) for index, both in rotated.items()}


def _fitting(
    readings: Iterable[Rotation], rotated: list[torch.Tensor], positions: list[int]
) -> LayerRotation:
    """What accounts for both queries and keys."""
    for candidate in (None, *readings):
        if all(explains(candidate, vectors, positions) for vectors in rotated):
            return candidate
    return UnknownRotation(
        "queries or keys depend on their positions in another way than by one rotary embedding "
        "that is the same for prompts of any length"
    )


def _readings(cos: torch.Tensor, sin: torch.Tensor) -> Iterator[Rotation]:
    """What tables of all positions may mean: an angle may be there once, in both halves, twice."""
    cos, sin = cos[0], sin[0]
    half = cos.shape[-1] // 2
    channels = slice(None)
    if torch.equal(cos[:, :half], cos[:, half:]):
        channels = slice(half)
    elif torch.equal(cos[:, ::2], cos[:, 1::2]):
        channels = slice(None, None, 2)
    for interleaved in (False, True):
        yield Rotation(cos[:, channels], sin[:, channels], interleaved)


@contextmanager
def _tables_noted(
    model: nn.Module, position_ids: torch.Tensor
) -> Iterator[list[Callable[[torch.Tensor], Tables]]]:
    """Lists what makes two tables from positions: each takes other positions and makes others."""
    makers: list[Callable[[torch.Tensor], Tables]] = []

    def is_positions(given: Any) -> bool:
        return isinstance(given, torch.Tensor) and torch.equal(given, position_ids)

    def look(
        module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], made: Any
    ) -> None:
        has_positions = any(map(is_positions, (*arguments, *named.values())))
        if not has_positions or not _are_tables(made, position_ids):
            return

        def make(positions: torch.Tensor) -> Tables:
            def replaced(given: Any) -> Any:
                return positions if is_positions(given) else given

            others = {name: replaced(each) for name, each in named.items()}
            return module(*map(replaced, arguments), **others)

        makers.append(make)

    hooks = [module.register_forward_hook(look, with_kwargs=True) for module in model.modules()]
    try:
        yield makers
    finally:
        for hook in hooks:
            hook.remove()


def _are_tables(made: Any, position_ids: torch.Tensor) -> bool:
    """Whether a module made two tensors with a row of numbers for each position."""
    return (
        isinstance(made, tuple)
        and len(made) == 2
        and all(isinstance(each, torch.Tensor) and each.ndim == 3 for each in made)
        and all(each.shape[:2] == position_ids.shape for each in made)
        and made[0].shape == made[1].shape
    )
