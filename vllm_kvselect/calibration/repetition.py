"""What a model says while it repeats a part of a text of which it sees only some entries."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from vllm_kvselect.offline.attention import attention_replaced, causal_attention, keeps_states
from vllm_kvselect.offline.capture import Layer
from vllm_kvselect.offline.kvzip import Chunk

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WIDER = 8
"""Elements that keys are wider by: of them one is the gate, and kernels like a multiple of 8."""


def repeated(
    model: "PreTrainedModel",
    layers: list[Layer],
    context: list[int],
    chunk: Chunk,
    log_gates: torch.Tensor,
) -> torch.Tensor:
    """Lets the model repeat a part of a text, word for word, with a gate before every entry.

    Attention to an entry is multiplied by its gate, before the weights are brought to a sum of 1.
    A gate of 1 shows the entry as it is, one of 0 hides it as if it were dropped.

    Args:
        model: The model that `layers` were captured from.
        layers: Captured from the context, or from more that begins with it.
        context: Its token ids.
        chunk: The part, and what makes the model repeat it.
        log_gates: `[num_ways, num_layers, num_kv_heads, num_tokens]`, each way a repetition of its
            own. Gradients reach it.

    Returns:
        Logits of the part's tokens, `[num_ways, chunk_size, vocabulary_size]`.
    """
    num_tokens, num_ways = len(context), len(log_gates)
    again = context if keeps_states(model) else []

    def attend(
        index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        own = slice(len(again), None)
        before = (layers[index].key[:, :num_tokens], layers[index].value[:, :num_tokens])
        keys, values = (
            torch.cat((part.expand(num_ways, -1, -1, -1), fresh[:, :, own]), dim=2)
            for part, fresh in zip(before, (key, value), strict=True)
        )
        output = _attention(query[:, :, own], keys, values, log_gates[:, index], scale)
        if not again:
            return output
        query, key, value = (part[:, :, : len(again)] for part in (query, key, value))
        return torch.cat((causal_attention(query, key, value, scale), output), dim=2)

    token_ids = torch.tensor([again + chunk.token_ids], device=model.device)
    positions = torch.arange(token_ids.shape[1], device=model.device) + num_tokens - len(again)
    with attention_replaced(model, attend):
        logits: torch.Tensor = model(
            token_ids.expand(num_ways, -1),
            position_ids=positions.expand(num_ways, -1),
            use_cache=False,
            logits_to_keep=chunk.stop - chunk.start + 1,
        ).logits
    return logits[:, :-1]


def divergence(logits: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """How much worse a model foretells what the full cache says: a Kullback-Leibler divergence.

    Args:
        logits: `[..., num_tokens, vocabulary_size]`.
        full: Those of the full cache, `[num_tokens, vocabulary_size]`.

    Returns:
        Nats of each token, `[..., num_tokens]`, at least float32.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    found, expected = (part.to(dtype).log_softmax(dim=-1) for part in (logits, full))
    each = F.kl_div(found, expected.expand_as(found), log_target=True, reduction="none")
    return each.sum(dim=-1)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_gates: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of the last tokens to gated ones and, causally, to each other.

    The logarithm of a gate is one more element of its key, whose counterpart in every query is 1.
    So PyTorch's fused attention adds it, and keeps no matrix of weights for the gradients.

    Args:
        query: `[num_ways, num_heads, num_queries, head_size]`.
        key: `[num_ways, num_kv_heads, num_context + num_queries, head_size]`.
        value: Likewise.
        log_gates: `[num_ways, num_kv_heads, num_context]`.
        scale: Softmax scale.
    """
    num_queries, num_context, head_size = query.shape[2], log_gates.shape[2], query.shape[3]
    # By KV head, its group's queries in a row: keys and values are not copied for each of them.
    rows = query.reshape(*key.shape[:2], -1, head_size) * scale
    gates = F.pad(log_gates.to(key.dtype), (0, num_queries)).unsqueeze(3)
    visible = torch.ones(num_queries, key.shape[2], dtype=torch.bool, device=query.device)
    output = F.scaled_dot_product_attention(
        torch.cat((rows, torch.ones_like(rows[..., :_WIDER])), dim=3),
        torch.cat((key, gates, *[torch.zeros_like(gates)] * (_WIDER - 1)), dim=3),
        F.pad(value, (0, _WIDER)),
        attn_mask=visible.tril(num_context).repeat(rows.shape[2] // num_queries, 1),
        scale=1.0,
    )
    return output[..., :head_size].reshape(query.shape)
