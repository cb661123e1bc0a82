"""Binds each attention layer to its model's rotary embedding, which vLLM's layers do not know."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import Phi3LongRoPEScaledRotaryEmbedding

from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.bind.trial_run import ReachedError, arguments, standing_in
from vllm_kvselect.engine.log import logger
from vllm_kvselect.registry import methods_without
from vllm_kvselect.scoring.rotation import Rotation, explains

_UNTRIED = "it cannot be tried how it rotates queries"


def find_rotations(
    model: nn.Module, model_config: ModelConfig, device: torch.device
) -> dict[str, Rotation | None]:
    """Finds how queries and keys are rotated by position, in each layer that drops entries.

    The module that holds an attention layer runs once on one token at several positions. Its
    queries and keys must be the same but for a rotation by the tables of a module in it, or the
    same altogether: some models have layers that do not rotate, and keep the module all the same.

    Where positions have several parts (M-RoPE), they are given as vLLM gives those of text: all
    parts alike. Requests with anything else are refused (`frontend/requests.py`).

    Returns:
        By the attention layer's name; None for layers that do not rotate. Tables are the model's
        own memory.

    Raises:
        ConfigError: If a layer's queries and keys depend on positions in another way, or it cannot
            be seen how.
    """
    modules = dict(model.named_modules())
    found = {}
    for name, attention in modules.items():
        if not isinstance(attention, Attention) or attention.sliding_window is not None:
            continue
        if attention.kv_sharing_target_layer_name is not None:  # it rotates queries alone
            continue
        parent = modules[name.rpartition(".")[0]]
        try:
            found[attention.layer_name] = _rotation(parent, attention, model_config, device)
        except _UnknownError as error:
            raise ConfigError(_refusal(model, f"in {name.rpartition('.')[0]}, {error}")) from None
    return found


class _UnknownError(Exception):
    """A layer's rotation cannot be told; says why."""


def _refusal(model: nn.Module, reason: str) -> str:
    others = ", ".join(methods_without("rotation"))
    return (
        "methods that need queries as they were before their positions cannot be used with "
        f"{type(model).__name__}: {reason}; choose one of {others}"
    )


def _rotation(
    parent: nn.Module, attention: Attention, model_config: ModelConfig, device: torch.device
) -> Rotation | None:
    """The rotation of one layer."""
    last = model_config.max_model_len - 1
    positions = sorted({0, 1, last // 2, last})
    rotated = _rotated(parent, attention, model_config, torch.tensor(positions, device=device))
    for candidate in (None, *_candidates(parent)):
        too_short = candidate is not None and len(candidate.cos) <= last
        if not too_short and all(explains(candidate, each, positions) for each in rotated):
            return candidate
    raise _UnknownError(
        "queries or keys depend on positions in another way than by one rotary embedding"
    )


def _candidates(parent: nn.Module) -> Iterator[Rotation]:
    """What the tables of vLLM's rotary embeddings may mean."""
    for module in parent.modules():
        for table in _tables(module):
            cos, sin = table.chunk(2, dim=-1)
            yield Rotation(cos, sin, interleaved=not getattr(module, "is_neox_style", True))


def _tables(module: nn.Module) -> Iterator[torch.Tensor]:
    """Tables of a module, `[num_positions, rotated_size]`: cosines, then sines."""
    table = getattr(module, "cos_sin_cache", None)
    if isinstance(table, torch.Tensor) and table.ndim == 2:
        yield table
    if isinstance(module, Phi3LongRoPEScaledRotaryEmbedding):
        # One for short contexts and one for long ones; an engine uses one of them.
        border = module.original_max_position_embeddings
        yield module.long_short_cos_sin_cache[:border]
        yield module.long_short_cos_sin_cache[border:]


@torch.no_grad()
def _rotated(
    parent: nn.Module, attention: Attention, model_config: ModelConfig, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of one token at all positions, `[num_positions, heads, head_size]` each."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, model_config.get_hidden_size(), generator=draw)
    hidden = hidden.to(positions.device, model_config.dtype).repeat(len(positions), 1)
    parts = positions.expand(3, -1) if model_config.uses_mrope else positions
    given = arguments(parent, parts, hidden)
    if given is None:
        raise _UnknownError(
            f"{type(parent).__name__} wants more than positions and hidden states, so that "
            f"{_UNTRIED}"
        )

    def reached(query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> None:
        raise ReachedError(query, key)

    try:
        with standing_in(attention, reached, parent):
            parent(**given)
    except ReachedError as stopped:
        by_head = (len(positions), -1, attention.head_size)
        query, key = (each.reshape(by_head) for each in stopped.given)
        return query, key
    except Exception as error:  # whatever a model's code may need that is not there
        logger.debug("no trial run of %s: %s", type(parent).__name__, error)
        raise _UnknownError(
            f"{type(parent).__name__} cannot be run alone, so that {_UNTRIED}"
        ) from None
    raise _UnknownError(f"{type(parent).__name__} does not call its attention layer")
