"""Queries, keys and values of every layer, and the model's run on a cache with dropped entries.

Both go through transformers' public registry of attention functions (`attention.py`), so any causal
language model that uses it will do, as long as its layers attend plainly.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from vllm_kvselect.offline.attention import (
    OutputProjections,
    attending_layers,
    attention_replaced,
    keeps_states,
)
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.rotations import LayerRotation, UnknownRotation, find_rotations
from vllm_kvselect.scoring.value_norms import OutputProjection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Layer(NamedTuple):
    """What one layer's attention reads, positions applied.

    Attributes:
        query: `[num_tokens, num_heads, head_size]`, head `h` reads KV head `h // group`.
        key: `[num_kv_heads, num_tokens, head_size]`.
        value: `[num_kv_heads, num_tokens, head_size]`.
        scale: Softmax scale.
        projection: W_O by KV head; None where something, such as a gate, comes before it.
        rotation: How positions were applied to queries and keys.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    projection: OutputProjection | None
    rotation: LayerRotation = None

    @property
    def output_projection(self) -> OutputProjection:
        """W_O, for whom needs it.

        Raises:
            EvaluationError: If nothing reads the attention's output as it is.
        """
        if self.projection is None:
            raise EvaluationError("a layer does not project its attention's output directly")
        return self.projection


class Continuation(NamedTuple):
    """What the model makes of the tokens that follow a prompt.

    Attributes:
        hidden_states: The input of every layer that attends and the last hidden state, after the
            final norm: `[num_layers + 1, num_following, hidden_size]`.
        logits: `[num_following, vocabulary_size]`.
    """

    hidden_states: torch.Tensor
    logits: torch.Tensor


@torch.no_grad()
def capture(model: "PreTrainedModel", token_ids: list[int]) -> list[Layer]:
    """Runs the model over all tokens with the full cache and keeps what its attention reads.

    Args:
        model: A causal language model.
        token_ids: Prompt and what follows it.

    Returns:
        The layers that attend, in order.

    Raises:
        EvaluationError: If a layer's attention is not plain.
    """
    read: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]] = {}

    def record(
        index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        read[index] = (query[0].transpose(0, 1).contiguous(), key[0], value[0], scale)
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )

    with OutputProjections() as projections, attention_replaced(model, record, projections.watch):
        model.base_model(torch.tensor([token_ids], device=model.device), use_cache=False)
    num_layers = len(attending_layers(model))
    if sorted(read) != list(range(num_layers)) or len({read[i][1].shape for i in read}) != 1:
        raise EvaluationError(
            f"{type(model).__name__} runs {len(read)} of its {num_layers} attending layers through "
            "transformers' attention registry, or their KV heads differ; the analysis needs a "
            "model whose layers all attend in the same way"
        )
    rotations = find_rotations(model, token_ids)
    unknown = UnknownRotation("the model takes no positions")
    layers = []
    for index, (query, key, value, scale) in sorted(read.items()):
        is_known = projections.knows(index)
        projection = projections.of(index, query, key.shape[0]) if is_known else None
        rotation = rotations.get(index, unknown)
        layers.append(Layer(query, key, value, scale, projection, rotation))
    return layers


@torch.no_grad()
def continue_prompt(
    model: "PreTrainedModel",
    layers: list[Layer],
    prompt: Sequence[int],
    following: list[int],
    retained: torch.Tensor,
) -> Continuation:
    """Runs the model over the tokens that follow a prompt, on the entries that are retained of it.

    Args:
        model: The model that `layers` were captured from.
        layers: Captured from the prompt, or from more that begins with it.
        prompt: Its token ids, which run again if the model keeps states beside keys and values.
        following: Token ids after the prompt, each of which sees those before it.
        retained: Entries of the prompt, `[num_layers, num_kv_heads, num_prompt_tokens]` bool.

    Returns:
        Hidden states and logits of the following tokens.
    """
    from transformers import DynamicCache

    again = list(prompt) if keeps_states(model) else []
    num_kv_heads, num_prompt_tokens = retained.shape[1:]
    group = layers[0].query.shape[1] // num_kv_heads
    num_tokens, num_rows = num_prompt_tokens + len(following), len(again) + len(following)
    causal = retained.new_ones(num_rows, num_tokens).tril(num_tokens - num_rows)

    def attend(
        index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        mask = causal.repeat(group * num_kv_heads, 1, 1)
        before = retained[index].repeat_interleave(group, dim=0)[:, None]
        mask[:, len(again) :, :num_prompt_tokens] = before
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask[None], scale=scale, enable_gqa=True
        )

    cache = None
    if not again:
        cache = DynamicCache()
        for index, layer in enumerate(layers):
            key, value = (each[None, :, :num_prompt_tokens] for each in (layer.key, layer.value))
            cache.update(key, value, index)
    with attention_replaced(model, attend):
        output = model(
            torch.tensor([again + following], device=model.device),
            past_key_values=cache,
            use_cache=cache is not None,
            output_hidden_states=True,
        )
    inputs = [output.hidden_states[i] for i in attending_layers(model)]
    hidden_states = torch.cat([*inputs, output.hidden_states[-1]])
    return Continuation(hidden_states[:, len(again) :], output.logits[0, len(again) :])
