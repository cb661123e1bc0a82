"""Observers: what is remembered of a prompt while it is prefilled, until it can be scored.

A prompt may come in chunks, over several steps, and a step's tensors are gone after it. What a
scorer needs of earlier chunks is kept by an observer: one for each request, for all layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.inputs import Scorer, ScoringInputs

Function = TypeVar("Function", bound=Callable[..., Any])


class Twins(Protocol):
    """Gives a device's twin of a function, or the function itself; `Kernels.twin` does."""

    def __call__(self, reference: Function) -> Function:
        """Finds it by the function's name."""


def no_twins(reference: Function) -> Function:
    """References compute everything."""
    return reference


class Observer(ABC):
    """Sees a prompt's tokens chunk by chunk in every layer, then scores its entries.

    Args:
        num_tokens: Length of the prompt.
        num_layers: Layers that observe.
        config: The request's configuration.

    Attributes:
        whole_prompt: Whether every token must be observed. Then none may come from the prefix
            cache, since its queries would be missing.
        reads_earlier_keys: Whether `observe` needs the keys of all tokens so far, or only those of
            the chunk.
    """

    whole_prompt: ClassVar[bool] = False
    reads_earlier_keys: ClassVar[bool] = False

    def __init__(self, num_tokens: int, num_layers: int, config: EvictionConfig) -> None:
        self.num_tokens, self.num_layers, self.config = num_tokens, num_layers, config
        self._next_positions = [self.first_position] * num_layers

    @property
    @abstractmethod
    def first_position(self) -> int:
        """Position of the first token that is observed."""

    def observe(self, inputs: ScoringInputs, first_position: int, twin: Twins = no_twins) -> None:
        """Sees a chunk in the layer `inputs.layer_index`.

        Args:
            inputs: The chunk, from the first token that is observed on; keys from the prompt's
                first token on if `reads_earlier_keys`.
            first_position: Position of its first query in the prompt.
            twin: What computes in place of references.

        Raises:
            RuntimeError: If tokens in between were not observed: the scores would be wrong.
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

    @abstractmethod
    def scores(self, inputs: ScoringInputs, scorer: Scorer, config: EvictionConfig) -> torch.Tensor:
        """Scores the prompt in the layer `inputs.layer_index`, once all of it is observed.

        Args:
            inputs: The whole prompt's keys and values; its queries are not read.
            scorer: The rule.
            config: The request's configuration, or with other parameters for another stage.

        Returns:
            `[num_kv_heads, num_tokens - window]`, at least float32.
        """

    def release(self, layer_index: int) -> None:  # noqa: B027 (most keep all layers together)
        """Gives back what is remembered of a layer that is scored."""


class WindowQueries(Observer):
    """The observation window: its queries, of all the chunks that reach into it."""

    _queries: torch.Tensor | None = None

    @property
    def first_position(self) -> int:
        """Position of the window's first token."""
        return self.num_tokens - self.config.window

    def _observe(self, inputs: ScoringInputs, first_position: int, twin: Twins) -> None:
        query = inputs.query
        if self._queries is None:
            shape = (self.num_layers, self.config.window, *query.shape[1:])
            self._queries = query.new_empty(shape)
        start = first_position - self.first_position
        self._queries[inputs.layer_index, start : start + len(query)] = query

    def scores(self, inputs: ScoringInputs, scorer: Scorer, config: EvictionConfig) -> torch.Tensor:
        """Scores by the window's queries; see `Observer.scores`."""
        assert self._queries is not None
        return scorer(replace(inputs, query=self._queries[inputs.layer_index]), config)
