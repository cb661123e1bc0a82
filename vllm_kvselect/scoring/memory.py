"""Memories: what is kept of a request's tokens until its entries are scored.

A step's tensors are gone after it, and scorers need some of them later. There are two memories: the
*last queries*, through which the latest tokens look back; and *the score of each entry*, which
moves with it from cut to cut.
"""

from typing import NamedTuple

import torch


class StepQueries:
    """Queries of some tokens of a batch, in all layers.

    One piece of memory for all requests of the step: each layer adds its part in one go.
    """

    def __init__(self, tokens: slice | torch.Tensor, num_layers: int) -> None:
        self._tokens, self._num_layers = tokens, num_layers
        self._queries: torch.Tensor | None = None

    def see(self, layer_index: int, query: torch.Tensor) -> None:
        """Keeps the queries of a layer.

        Args:
            layer_index: The layer's place in the group.
            query: Queries of the batch, `[num_tokens, num_heads, head_size]`.
        """
        kept = query[self._tokens]
        if self._queries is None:
            self._queries = kept.new_empty(self._num_layers, *kept.shape)
        self._queries[layer_index] = kept

    def take(self, queries: torch.Tensor) -> None:
        """Keeps them from the queries of all layers, `[num_layers, num_tokens, ...]`."""
        self._queries = queries[:, self._tokens].clone()

    @property
    def all(self) -> torch.Tensor:
        """`[num_layers, n, num_heads, head_size]`; of layers that have not seen them, anything."""
        assert self._queries is not None
        return self._queries


class _Piece(NamedTuple):
    """Queries of neighbouring tokens, between two positions, from a place of a step's on."""

    begin: int
    end: int
    step: StepQueries
    place: int

    def part(self, begin: int, end: int) -> slice:
        """Which of the step's queries those between two positions are."""
        shift = self.place - self.begin
        return slice(max(self.begin, begin) + shift, min(self.end, end) + shift)


class LastQueries:
    """The queries that the next drop of a request looks through, by position."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []

    def keep(self, step: StepQueries, place: int, begin: int, end: int) -> None:
        """Keeps the queries of neighbouring tokens; the first has a place among the step's.

        Those of the same and of later positions are of drafts that were rejected.
        """
        while self._pieces and self._pieces[-1].begin >= begin:
            self._pieces.pop()
        if self._pieces and self._pieces[-1].end > begin:
            self._pieces[-1] = self._pieces[-1]._replace(end=begin)
        self._pieces.append(_Piece(begin, end, step, place))

    def forget_before(self, position: int) -> None:
        """Gives back what no later drop looks through."""
        self._pieces = [piece for piece in self._pieces if piece.end > position]

    def between(self, begin: int, end: int) -> list[torch.Tensor]:
        """Queries between two positions in all layers, which have seen them.

        Returns:
            In their order, `[num_layers, n, num_heads, head_size]` each.

        Raises:
            LookupError: If a query is missing: what is scored would be wrong.
        """
        parts, position = [], begin
        for piece in self._pieces:
            if piece.begin <= position < min(piece.end, end):
                parts.append(piece.step.all[:, piece.part(position, end)])
                position = min(piece.end, end)
        if position != end:
            raise LookupError(f"the queries of tokens {position} to {end} were not kept")
        return parts
