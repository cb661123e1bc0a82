"""Binds each attention layer to its output projection, which vLLM's layers do not know."""

import re
from typing import NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear

from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.bind.trial_run import ReachedError, arguments, standing_in
from vllm_kvselect.engine.log import logger
from vllm_kvselect.registry import METHODS
from vllm_kvselect.scoring.value_norms import OutputProjection


class _Place(NamedTuple):
    """An attention layer and its projection in the module that calls both."""

    parent: nn.Module
    attention: Attention
    wrapped: nn.Module
    """The projection as the parent calls it: with LoRA, vLLM wraps every linear layer."""
    projection: RowParallelLinear


def find_output_projections(
    model: nn.Module, dtype: torch.dtype, device: torch.device
) -> dict[str, RowParallelLinear]:
    """Finds the projection that reads the output of each attention layer with a cache of its own.

    It is the row-parallel linear layer beside the attention layer in the model's tree whose input
    is as wide as the attention's output. Nothing may come between the two, such as the gate of
    AfMoE or Step-3.5: the norms of `V W_O` would not be what an entry adds to the output. So the
    module that holds both runs once on a token, with a random tensor in place of attention, and the
    projection must get that very tensor. Where the module cannot be called that way, because it
    wants more than positions and hidden states, its parts and switches named after a gate count.

    Not seen: a module that cannot be called and whose gate has another name, and what is done to
    the output behind the projection.

    Raises:
        ConfigError: If a layer has none, several, or one that does not read the attention's output.
    """
    modules = dict(model.named_modules())
    found = {}
    for name, attention in modules.items():
        if not isinstance(attention, Attention) or attention.kv_sharing_target_layer_name:
            continue
        parent = modules[name.rpartition(".")[0]]
        candidates = _candidates(parent, attention)
        if len(candidates) != 1:
            reason = f"found {len(candidates)} output projections for {name}, not one"
            raise ConfigError(_refusal(model, reason))
        place = _Place(parent, attention, *candidates[0])
        if obstacle := _obstacle(place, dtype, device):
            raise ConfigError(_refusal(model, f"in {name.rpartition('.')[0]}, {obstacle}"))
        found[attention.layer_name] = place.projection
    return found


def _candidates(
    parent: nn.Module, attention: Attention
) -> list[tuple[nn.Module, RowParallelLinear]]:
    width = attention.num_heads * attention.head_size_v
    pairs = ((child, getattr(child, "base_layer", child)) for child in parent.children())
    return [
        (child, layer)
        for child, layer in pairs
        if isinstance(layer, RowParallelLinear) and layer.input_size_per_partition == width
    ]


def _refusal(model: nn.Module, reason: str) -> str:
    others = ", ".join(name for name, method in METHODS.items() if not method.perturbation)
    return (
        "methods that weigh entries by the norms of projected values cannot be used with "
        f"{type(model).__name__}: {reason}; choose one of {others}"
    )


def _obstacle(place: _Place, dtype: torch.dtype, device: torch.device) -> str | None:
    """What is between attention and projection, or None."""
    is_direct = _is_direct(place, dtype, device)
    if is_direct is False:
        return "something, such as a gate, changes attention's output before its projection"
    gates = _named_after_gates(place.parent) if is_direct is None else []
    return f"{', '.join(gates)} may gate attention's output" if gates else None


@torch.no_grad()
def _is_direct(place: _Place, dtype: torch.dtype, device: torch.device) -> bool | None:
    """Whether the projection reads what attention gives; None if a trial run shows neither."""
    draw = torch.Generator().manual_seed(0)
    sizes = place.attention.num_heads * place.attention.head_size_v, place.projection.output_size
    output, hidden = (torch.randn(1, size, generator=draw).to(device, dtype) for size in sizes)
    positions = torch.zeros(1, dtype=torch.int64, device=device)
    given = arguments(place.parent, positions, hidden)
    if given is None:
        return None

    def reached(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        raise ReachedError(inputs[0])

    handle = place.wrapped.register_forward_pre_hook(reached)
    try:
        with standing_in(place.attention, lambda *_, **__: output, place.parent):
            place.parent(**given)
    except ReachedError as stopped:
        (read,) = stopped.given
        return read.numel() == output.numel() and torch.equal(read.view_as(output), output)
    except Exception as error:  # whatever a model's code may need that is not there
        logger.debug("no trial run of %s: %s", type(place.parent).__name__, error)
    finally:
        handle.remove()
    return None


def _named_after_gates(module: nn.Module) -> list[str]:
    """Parts of an attention module that are named after a gate, and switches that are on."""
    parts = [name for name, _ in module.named_children()]
    switches = [name for name, value in vars(module).items() if value is True]
    return [name for name in parts + switches if re.search(r"gate|(^|_)g_proj$", name)]


@torch.no_grad()
def materialise(
    layer: LinearBase, num_kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> OutputProjection:
    """Computes a projection's matrix through its own forward, so quantised weights work too.

    The quantisation method is applied directly: without the bias and, under tensor parallelism,
    without the all-reduce, since a head's norm needs only the rows of its own rank.
    """
    identity = torch.eye(layer.input_size_per_partition, dtype=dtype, device=device)
    matrix = layer.quant_method.apply(layer, identity)
    by_head = matrix.view(num_kv_heads, -1, head_size, matrix.shape[-1])
    return OutputProjection.of(by_head.transpose(1, 2).contiguous())
