"""The model's run on a cache with dropped entries, with the hidden states of every layer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from vllm_kvselect.offline.attention import attending_layers, attention_replaced, keeps_states
from vllm_kvselect.offline.capture import Layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
