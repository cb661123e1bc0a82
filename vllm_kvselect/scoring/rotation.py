"""Rotary position embedding (RoPE, arXiv 2104.09864), and its inverse.

Attention reads queries and keys that are rotated by their positions. What a query-agnostic score
asks of a token does not depend on where it stands, so it is asked of the vectors before that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch


@dataclass(frozen=True)
class Rotation:
    """How a model rotates its queries and keys.

    Attributes:
        cos: Cosines, times the factor by which some models stretch the vectors (YaRN),
            `[num_positions, rotated_size / 2]`.
        sin: Sines, likewise.
        interleaved: Whether neighbours make a pair (GPT-J), or the halves of the rotated part
            (NeoX).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    def undo(self, vectors: torch.Tensor, first_position: int = 0) -> torch.Tensor:
        """Turns vectors back to what they were before the rotation.

        Args:
            vectors: `[..., num_tokens, head_size]`; beyond `rotated_size` nothing is rotated.
            first_position: Position of the first token.

        Returns:
            The same shape, at least float32.
        """
        cos, sin = self.rows(first_position, vectors.shape[-2])
        stretch = cos.square() + sin.square()
        return self._turn(vectors, cos / stretch, -sin / stretch)

    def apply(self, vectors: torch.Tensor, first_position: int = 0) -> torch.Tensor:
        """Rotates vectors; arguments and result as in `undo`."""
        return self._turn(vectors, *self.rows(first_position, vectors.shape[-2]))

    def mean(self, first_position: int, num_positions: int) -> Self:
        """The mean of the rotations at several positions, one map for all tokens.

        Positions beyond the tables are left out: the model has no tokens there.

        Returns:
            A map to `apply`; the mean of rotations is not a rotation.
        """
        first = min(first_position, len(self.cos) - 1)
        cos, sin = self.rows(first, num_positions)
        return replace(self, cos=cos.mean(0, keepdim=True), sin=sin.mean(0, keepdim=True))

    def rows(self, first_position: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of some positions, at least float32; fewer where the tables end."""
        dtype = torch.promote_types(self.cos.dtype, torch.float32)
        positions = slice(first_position, first_position + num_positions)
        return self.cos[positions].to(dtype), self.sin[positions].to(dtype)

    def _turn(self, vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rotated_size = 2 * cos.shape[-1]
        rotated, rest = vectors[..., :rotated_size], vectors[..., rotated_size:]
        shape = (-1, 2) if self.interleaved else (2, -1)
        pairs = rotated.reshape(*rotated.shape[:-1], *shape)
        pair_dim = -1 if self.interleaved else -2
        x, y = pairs.unbind(pair_dim)
        turned = torch.stack((x * cos - y * sin, x * sin + y * cos), dim=pair_dim).flatten(-2)
        return torch.cat((turned, rest.to(turned.dtype)), dim=-1)


def explains(rotation: Rotation | None, vectors: torch.Tensor, positions: Sequence[int]) -> bool:
    """Whether one token's queries, or keys, at several positions differ by the rotation alone.

    Args:
        rotation: How they may be rotated; None for not at all.
        vectors: `[len(positions), num_heads, head_size]`.
        positions: Where the token stood.

    Returns:
        Whether they are the same before the rotation, up to rounding. Zeros show nothing.
    """
    before = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    if rotation is not None:
        if 2 * rotation.cos.shape[-1] > vectors.shape[-1]:
            return False
        by_position = zip(before[:, :, None], positions, strict=True)
        before = torch.stack([rotation.undo(each, first) for each, first in by_position])
    tolerance = max(1e-3, 8 * torch.finfo(vectors.dtype).eps)
    return bool((before - before[0]).abs().max() < tolerance * before.abs().max())
