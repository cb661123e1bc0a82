"""Our own attention functions inside a transformers model, and W_O of its layers.

What a layer asks for beyond plain causal softmax attention is refused, since the papers' equations,
and the methods, do not cover it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from vllm_kvselect.layer_kinds import HYBRID, STATES, WITHOUT_ATTENTION
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.scoring.value_norms import OutputProjection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "vllm_kvselect"
"""Our name in transformers' registries of attention and of mask functions."""

_NOT_PLAIN = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Arguments by which a layer asks for more than plain attention."""

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""`(layer, query, key, value, scale)`, tensors `[1, heads, tokens, head_size]`, -> output of the
query's shape. Queries are those of the last tokens. Layers count among those that attend."""

Watcher = Callable[[nn.Module, int, torch.Tensor], None]
"""`(attention module, layer, output [1, num_tokens, num_heads, head_size])`."""


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """What a plain layer computes, of as many queries as keys."""
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )


def attending_layers(model: "PreTrainedModel") -> list[int]:
    """The layers of a model that attend, in order: all of them, except in hybrids."""
    kinds = _kinds(model)
    return [layer for layer, kind in enumerate(kinds) if kind not in WITHOUT_ATTENTION]


def keeps_states(model: "PreTrainedModel") -> bool:
    """Whether a model remembers earlier tokens by more than their keys and values."""
    return not {HYBRID, *STATES}.isdisjoint(_kinds(model))


def _kinds(model: "PreTrainedModel") -> list[str]:
    config = model.config.get_text_config()
    names = ("layers_block_type", "layer_types")
    listed = next(filter(None, (getattr(config, name, None) for name in names)), None)
    return list(listed or ["attention"] * config.num_hidden_layers)


@contextmanager
def attention_replaced(
    model: "PreTrainedModel", attention: Attention, watcher: Watcher | None = None
) -> Iterator[None]:
    """Lets every layer of a model attend by a function of ours, for a while.

    The watcher sees each attention module's output, before the module goes on.

    Raises:
        EvaluationError: If the model does not use the registry, or a layer's attention, once it
            is called, is not plain.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        _check_plain(module, query, key, value, attention_mask, others)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        index = places[int(module.layer_idx)]  # type: ignore[arg-type]
        output = attention(index, query, key, value, scale).transpose(1, 2).contiguous()
        if watcher is not None:
            watcher(module, index, output)
        return output, None

    places = {layer: place for place, layer in enumerate(attending_layers(model))}
    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    try:
        model.set_attn_implementation(_NAME)
        if model.config._attn_implementation != _NAME:
            raise EvaluationError(
                f"{type(model).__name__} does not take its attention from transformers' registry; "
                "the analysis needs a model that does"
            )
        yield
    finally:
        model.set_attn_implementation(before)
        # The registry lives as long as the process, and `attend` holds on to the model.
        AttentionInterface.register(_NAME, _replaced_no_more)


def _replaced_no_more(*_: Any, **__: Any) -> None:
    raise RuntimeError("this attention is computed in `attention_replaced` only")


def _check_plain(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    others: dict[str, Any],
) -> None:
    """Refuses attention that is more than causal softmax over keys and values of one size."""
    odd = [name for name in _NOT_PLAIN if others.get(name) is not None]
    if key.shape != value.shape:
        odd.append(f"keys of size {key.shape[-1]} and values of size {value.shape[-1]}")
    if not getattr(module, "is_causal", True):
        odd.append("no causal mask")
    if mask is not None:
        num_queries, num_keys = query.shape[2], key.shape[2]
        causal = torch.ones(num_queries, num_keys, dtype=torch.bool, device=mask.device)
        if mask.dtype != torch.bool or not mask.equal(
            causal.tril(num_keys - num_queries).expand_as(mask)
        ):
            odd.append("a mask that is not causal")
    if odd:
        raise EvaluationError(
            f"{type(module).__name__} attends with {', '.join(odd)}; "
            "the analysis knows plain causal attention only"
        )


class OutputProjections:
    """W_O of every layer: the module that reads the attention's output, whatever its name.

    A context manager; the hooks that look for it are gone afterwards.
    """

    def __init__(self) -> None:
        self._found: dict[int, nn.Module] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def watch(self, module: nn.Module, layer: int, output: torch.Tensor) -> None:
        """Looks out for the child of an attention module that reads its output; a `Watcher`."""

        def look(child: nn.Module, arguments: tuple[Any, ...]) -> None:
            if arguments and torch.equal(arguments[0].flatten(), output.flatten()):
                self._found[layer] = child

        self._hooks += [child.register_forward_pre_hook(look) for child in module.children()]

    def knows(self, layer: int) -> bool:
        """Whether something read a layer's output as it was; behind a gate nothing does."""
        return layer in self._found

    def of(self, layer: int, query: torch.Tensor, num_kv_heads: int) -> OutputProjection:
        """Computes a layer's W_O through the module's own forward, so quantised weights work too.

        Args:
            layer: Index of the layer.
            query: Its queries, `[num_tokens, num_heads, head_size]`, for shapes and dtype.
            num_kv_heads: Its KV heads.

        Raises:
            EvaluationError: If it is not known.
        """
        if not self.knows(layer):
            raise EvaluationError(f"layer {layer} does not project its attention's output directly")
        child = self._found[layer]
        head_size = query.shape[2]
        identity = torch.eye(query[0].numel(), dtype=query.dtype, device=query.device)
        matrix = child(identity[None])[0] - child(torch.zeros_like(identity[None]))[0]  # no bias
        by_head = matrix.view(num_kv_heads, -1, head_size, matrix.shape[-1])
        return OutputProjection.of(by_head.transpose(1, 2).contiguous())
