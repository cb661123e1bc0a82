"""Memories: what is kept of a request's tokens until its entries are scored.

A step's tensors are gone after it, and scorers need some of them later. There are three memories:
the *last queries*, through which the latest tokens look back; *a number for each entry*, which
moves with it from cut to cut; and *moments*, in which all queries become one cloud. Some observe
every token as it is computed, others only score entries when they first compete. Each completes
what a scorer may read, so that a scorer needs nothing but that.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.inputs import ScoringInputs, absent_columns

Function = TypeVar("Function", bound=Callable[..., Any])


class Twins(Protocol):
    """Gives a device's twin of a function, or the function itself; `Kernels.twin` does."""

    def __call__(self, reference: Function) -> Function:
        """Finds it by the function's name."""


def no_twins(reference: Function) -> Function:
    """References compute everything."""
    return reference


class StepQueries:
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

    @property
    def all(self) -> torch.Tensor:
        """`[num_layers, n, num_heads, head_size]`; of layers that have not seen them, anything."""
        assert self._queries is not None
        return self._queries


class _Piece(NamedTuple):
    """Queries of neighbouring tokens.

    Attributes:
        begin: Position of the first token.
        end: Position after the last one.
        step: Queries of the step that computed them.
        place: Place of the first one among these.
    """

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
        """Keeps the queries of neighbouring tokens.

        Those of the same and of later positions are of drafts that were rejected.

        Args:
            step: Queries of the step that computes them.
            place: Place of the first one among these.
            begin: Its position.
            end: Position after the last one.
        """
        while self._pieces and self._pieces[-1].begin >= begin:
            self._pieces.pop()
        if self._pieces and self._pieces[-1].end > begin:
            self._pieces[-1] = self._pieces[-1]._replace(end=begin)
        self._pieces.append(_Piece(begin, end, step, place))

    def forget_before(self, position: int) -> None:
        """Gives back what no later drop looks through."""
        self._pieces = [piece for piece in self._pieces if piece.end > position]

    def of_layer(self, index: int, begin: int, end: int) -> torch.Tensor:
        """Queries between two positions in a layer that has seen them.

        Returns:
            `[end - begin, num_heads, head_size]`.
        """
        return torch.cat(self._between(begin, end, index))

    def of_all_layers(self, begin: int, end: int) -> torch.Tensor:
        """The same of all layers, `[num_layers, end - begin, num_heads, head_size]`."""
        return torch.cat(self._between(begin, end, slice(None)), dim=1)

    def _between(self, begin: int, end: int, layers: int | slice) -> list[torch.Tensor]:
        """Raises `LookupError` where a query is missing: what is scored would be wrong."""
        parts, position = [], begin
        for piece in self._pieces:
            if piece.begin <= position < min(piece.end, end):
                parts.append(piece.step.all[layers][..., piece.part(position, end), :, :])
                position = min(piece.end, end)
        if position != end:
            raise LookupError(f"the queries of tokens {position} to {end} were not kept")
        return parts


class Memory(ABC):
    """What is remembered of a request in all layers.

    Args:
        num_tokens: Tokens of the request's prompt that are observed, if any are.
        num_layers: Layers that it is of.
        config: The request's configuration.
    """

    def __init__(self, num_tokens: int, num_layers: int, config: EvictionConfig) -> None:
        self.num_tokens, self.num_layers, self.config = num_tokens, num_layers, config

    @abstractmethod
    def complete(self, inputs: ScoringInputs, twin: Twins = no_twins) -> ScoringInputs:
        """Adds what is remembered to what the scorer reads in the layer `inputs.layer_index`.

        Args:
            inputs: What competes, and what comes after it up to the cut.
            twin: What computes in place of references.
        """

    def release(self, layer_index: int) -> None:  # noqa: B027 (most keep all layers together)
        """Gives back what is remembered of a layer that is scored."""


class ObservingMemory(Memory):
    """Sees a request's tokens chunk by chunk in every layer, from the first one on.

    None may come from the prefix cache then, since its query would be missing.

    Attributes:
        reads_earlier_keys: Whether `observe` needs the keys of all tokens so far, or only those of
            the chunk.
    """

    reads_earlier_keys: ClassVar[bool] = False

    def __init__(self, num_tokens: int, num_layers: int, config: EvictionConfig) -> None:
        super().__init__(num_tokens, num_layers, config)
        self._next_positions = [0] * num_layers

    def observe(self, inputs: ScoringInputs, first_position: int, twin: Twins = no_twins) -> None:
        """Sees a chunk in the layer `inputs.layer_index`.

        Args:
            inputs: The chunk; keys from the prompt's first token on if `reads_earlier_keys`.
            first_position: Position of its first query in the prompt.
            twin: What computes in place of references.

        Raises:
            RuntimeError: If tokens in between were not seen: the scores would be wrong.
        """
        expected = self._next_positions[inputs.layer_index]
        if first_position != expected:
            raise RuntimeError(
                f"{self.config.method} has observed a prompt up to token {expected}, and it goes "
                f"on at {first_position}"
            )
        self._next_positions[inputs.layer_index] += len(inputs.query)
        self._observe(inputs, first_position, twin)

    @abstractmethod
    def _observe(self, inputs: ScoringInputs, first_position: int, twin: Twins) -> None:
        """Remembers what is needed of a chunk that follows the ones before it."""


class EntryNumbers(Memory):
    """A number for each entry, which moves with it from cut to cut.

    Numbers are laid out in columns when a cut is made: heads that hold fewer entries than others
    have none in the first columns, and all end with the latest one. In between they are as few as
    there are entries.
    """

    def __init__(self, num_tokens: int, num_layers: int, config: EvictionConfig) -> None:
        super().__init__(num_tokens, num_layers, config)
        # While a cut is made, in columns: those of packed entries first, as many as are counted.
        self._columns: torch.Tensor | None = None
        self._num_packed_columns = 0
        # In between, of the packed entries: layer by layer and head by head.
        self._packed: list[torch.Tensor] = []

    def lay_out(self, num_columns: int, num_packed: int, num_absent: torch.Tensor) -> None:
        """Lays the numbers out in columns, 0 for entries that are new.

        Args:
            num_columns: Columns in all.
            num_packed: Those of packed entries.
            num_absent: First columns of each head without an entry, `[num_layers, num_kv_heads]`.
        """
        self._num_packed_columns = num_packed
        if not self._packed:
            return  # nothing was dropped so far
        numbers = torch.cat(self._packed)
        columns = numbers.new_zeros(*num_absent.shape, num_columns)
        is_packed = ~absent_columns(num_absent, num_packed)
        packed = torch.zeros_like(columns[..., :num_packed])
        columns[..., :num_packed] = packed.masked_scatter_(is_packed, numbers)
        self._columns, self._packed = columns, []

    def keep(self, inputs: ScoringInputs) -> None:
        """Keeps a layer's completed numbers until `retain`: a later cut needs some of them."""

    def retain(self, first_layer: int, num_competing: int, retained: torch.Tensor) -> None:
        """Lets numbers of a layer, or of all layers, move with what is retained.

        Args:
            first_layer: The first of the layers; they come in order.
            num_competing: Columns before the tail.
            retained: `(layer * num_kv_heads + head) * num_competing + column`, ascending, `[n]`.
        """
        assert self._columns is not None
        competing = self._columns[first_layer:, :, :num_competing]
        self._packed.append(competing.flatten()[retained])

    @abstractmethod
    def settle(self, position: int, num_competing: int) -> None:
        """Ends a cut: what was not retained has no number any more.

        Args:
            position: Tokens up to the cut.
            num_competing: Columns before the tail.
        """


class EntrySums(ObservingMemory, EntryNumbers):
    """Numbers that every query changes: entries have them from their own query on.

    Attributes:
        position: Tokens of the request whose queries have changed them.
    """

    def __init__(self, num_tokens: int, num_layers: int, config: EvictionConfig) -> None:
        super().__init__(num_tokens, num_layers, config)
        self.position = num_tokens
        # Columns there are of a prompt from its first chunk on. In between, of what is behind the
        # packed entries:
        self._tail: torch.Tensor | None = None
        self._num_packed = 0

    @abstractmethod
    def added(self, inputs: ScoringInputs, first_position: int, twin: Twins) -> torch.Tensor:
        """What a chunk adds to the numbers of the latest entries.

        Args:
            inputs: The chunk, as in `observe`.
            first_position: Position of its first query.
            twin: What computes in place of references.

        Returns:
            `[num_kv_heads, n]`, of the `n` entries up to the chunk's end.
        """

    def _observe(self, inputs: ScoringInputs, first_position: int, twin: Twins) -> None:
        added = self.added(inputs, first_position, twin)
        if self._columns is None:
            self._columns = added.new_zeros(self.num_layers, len(added), self.num_tokens)
        end = first_position + len(inputs.query)
        self._columns[inputs.layer_index, :, end - added.shape[1] : end] += added

    def complete(self, inputs: ScoringInputs, twin: Twins = no_twins) -> ScoringInputs:
        """Adds the layer's numbers, with what queries add that were kept since `position`."""
        assert self._columns is not None
        numbers = self._columns[inputs.layer_index]
        if len(inputs.query):
            added = self.added(inputs, 0, twin)
            numbers[:, numbers.shape[1] - added.shape[1] :] += added
        return replace(inputs, numbers=numbers)

    def lay_out(self, num_columns: int, num_packed: int, num_absent: torch.Tensor) -> None:
        """Lays out those of packed entries and of the tail; see `EntryNumbers.lay_out`."""
        tail = self._columns if self._columns is not None else self._tail
        assert tail is not None, "no token was observed"
        self._packed = self._packed or [tail.new_zeros(0)]
        self._num_packed = sum(map(len, self._packed))
        super().lay_out(num_columns, num_packed, num_absent)
        assert self._columns is not None
        self._columns[..., num_packed : num_packed + tail.shape[2]] = tail
        self._tail = None

    def settle(self, position: int, num_competing: int) -> None:
        """Ends a cut: what is in the tail keeps its numbers."""
        assert self._columns is not None
        self.position, self._tail = position, self._columns[..., num_competing:].clone()
        self._columns = None

    def rest(self, position: int, num_packed: int, num_absent: torch.Tensor) -> None:
        """Goes on without a cut; arguments as of `settle` and `lay_out`."""
        assert self._columns is not None
        is_packed = ~absent_columns(num_absent, num_packed)
        # As many as there were: the size is known without reading it back.
        packed = torch.nonzero_static(is_packed.flatten(), size=self._num_packed).squeeze(-1)
        self.retain(0, num_packed, packed)
        self.settle(position, num_packed)
