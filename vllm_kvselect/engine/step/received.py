"""Attention that the entries of a request have received: sums that rounds go on adding up."""

from dataclasses import dataclass
from typing import Self

import torch

from vllm_kvselect.scoring.inputs import absent_columns


@dataclass(frozen=True)
class Received:
    """What each entry of a request has received from all queries before a position.

    One number for each entry, which moves with it. Where sums are laid out in columns, these are
    those of the entries before a round: heads that hold fewer have none in the first columns.

    Attributes:
        position: Tokens of the request whose queries are added up.
        packed: Of the packed entries, layer by layer, head by head, `[n]`.
        tail: Of those behind, up to the position, `[num_layers, num_kv_heads, num_tail]`.
    """

    position: int
    packed: torch.Tensor
    tail: torch.Tensor

    @classmethod
    def of_prompt(cls, sums: torch.Tensor) -> Self:
        """Of a prompt of which nothing is dropped, `[num_layers, num_kv_heads, num_tokens]`."""
        return cls(sums.shape[2], sums.new_empty(0), sums)

    @classmethod
    def after_cut(
        cls, position: int, sums: torch.Tensor, num_competing: int, retained: torch.Tensor
    ) -> Self:
        """Of what a cut retains.

        Args:
            position: Where the cut is made.
            sums: In columns, `[num_layers, num_kv_heads, num_columns]`.
            num_competing: Columns before the tail.
            retained: `(layer * num_kv_heads + head) * num_competing + column`, ascending.
        """
        competing, tail = sums[..., :num_competing], sums[..., num_competing:]
        return cls(position, competing.flatten()[retained], tail.clone())

    def after_more(
        self, position: int, sums: torch.Tensor, num_packed: int, num_absent: torch.Tensor
    ) -> Self:
        """Of the same entries and of later ones, without a cut.

        Args:
            position: Tokens whose queries are added up by now.
            sums: In columns, `[num_layers, num_kv_heads, num_columns]`.
            num_packed: Columns before the tail.
            num_absent: First columns of each head without an entry, `[num_layers, num_kv_heads]`.
        """
        is_packed = ~absent_columns(num_absent, num_packed)
        # As many as there were: the size is known without reading it back.
        packed = torch.nonzero_static(is_packed.flatten(), size=self.packed.numel()).squeeze(-1)
        return self.after_cut(position, sums, num_packed, packed)

    def in_columns(
        self, num_columns: int, num_packed: int, num_absent: torch.Tensor
    ) -> torch.Tensor:
        """The sums, and 0 for later entries; arguments as of `after_more`.

        Returns:
            `[num_layers, num_kv_heads, num_columns]`.
        """
        num_layers, num_kv_heads, num_tail = self.tail.shape
        sums = self.tail.new_zeros(num_layers, num_kv_heads, num_columns)
        is_packed = ~absent_columns(num_absent, num_packed)
        sums[..., :num_packed] = torch.zeros_like(sums[..., :num_packed]).masked_scatter_(
            is_packed, self.packed
        )
        sums[..., num_packed : num_packed + num_tail] = self.tail
        return sums
