"""Trial runs: an attention module of vLLM is called on made-up tokens, to see what it does."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


class ReachedError(Exception):
    """Stops a trial run where what it is about is reached, and has the tensors given to it."""

    def __init__(self, *given: torch.Tensor) -> None:
        self.given = given


def arguments(
    module: nn.Module, positions: torch.Tensor, hidden: torch.Tensor
) -> dict[str, torch.Tensor] | None:
    """Arguments with which to call an attention module on some tokens.

    Args:
        module: The module that holds the attention layer.
        positions: The tokens' positions, `[num_tokens]` int64.
        hidden: Their hidden states, `[num_tokens, hidden_size]`.

    Returns:
        By name; None if the module wants more than these.
    """
    given = {}
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if parameter.default is not parameter.empty or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if name in ("positions", "position_ids"):
            given[name] = positions
        elif name in ("hidden_states", "residual", "x"):
            given[name] = hidden
        else:
            return None
    return given


@contextmanager
def standing_in(
    attention: nn.Module, forward: Callable[..., Any], parent: nn.Module
) -> Iterator[None]:
    """Lets a function stand in for the attention layer of a module for a while; takes adapters off.

    With LoRA, vLLM wraps linear layers, and the wrappers read what only a step of the engine sets.
    """
    with ExitStack() as stack:
        stack.enter_context(in_place_of(attention, forward))
        for module in parent.modules():
            wrapped = getattr(module, "base_layer", None)
            if isinstance(wrapped, nn.Module):
                stack.enter_context(in_place_of(module, wrapped.forward))
        yield


@contextmanager
def in_place_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces what a module computes for a while."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
