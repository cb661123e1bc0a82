"""Queries of a step that are kept: rounds look through them later."""

from typing import NamedTuple, Protocol

import torch


class Sees(Protocol):
    """What is shown a step's queries."""

    def see(self, layer_index: int, query: torch.Tensor) -> None:
        """Keeps the queries of a layer, `[num_tokens, num_heads, head_size]`."""


class SeenQueries:
    """Queries of some tokens of a batch, in all layers.

    One piece of memory for all requests of the step: each layer adds its part in one go.

    Args:
        tokens: The tokens in the batch.
        num_layers: Layers of the group.
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

    def of_token(self, place: int) -> torch.Tensor:
        """Queries of one of the tokens, in their order, `[num_layers, num_heads, head_size]`."""
        assert self._queries is not None
        return self._queries[:, place]


class SeenQuery(NamedTuple):
    """Where the queries of a token are.

    Attributes:
        queries: Those of its step.
        place: Its place among them.
    """

    queries: SeenQueries
    place: int
