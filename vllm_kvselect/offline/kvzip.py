"""KVzip (arXiv 2505.23416): what a model attends to while it repeats its context word for word.

Whatever a later question asks for, an answer is put together from parts of the context; an entry
that is not read even to repeat all of it is read for nothing else. So no question shapes the
scores. The price is a second prefill: a teacher for cheaper scores (`calibration/`), and a
yardstick.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.offline.attention import attention_replaced, causal_attention, keeps_states
from vllm_kvselect.offline.capture import Layer
from vllm_kvselect.offline.models import chat, encode
from vllm_kvselect.registry import KNOWN_METHODS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_REPEAT_ALL = "\n\nRepeat the previous context exactly."
_REPEAT_PART = "\n\nRepeat the part of the previous context exactly, starting with"
_CUE_LEN = 8
"""Tokens before a later chunk that tell the model where to start."""
_NUM_FIRST = 4
"""First tokens of the context that every softmax sees: most heads rest their attention there."""
_BLOCK_ELEMENTS = 2**20
"""Logits alive at once: 4 MiB of float32 stay in a processor's cache; 64 take thrice as long."""

CHUNK_SIZE = 2048
"""Tokens that are repeated in one go, as published."""


class Chunk(NamedTuple):
    """A part of the context; instruction and repetition, which follow all of it, as tokens."""

    start: int
    stop: int
    token_ids: list[int]


@torch.no_grad()
def kvzip_scores(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    layers: list[Layer],
    context: list[int],
    chunk_size: int = CHUNK_SIZE,
) -> torch.Tensor:
    """Scores every entry of a context by the most attention that any query of the replay pays it.

    As in the authors' code, the tokens that are repeated share a query's attention with the first
    ones and the replay so far alone: so the cost grows with the context's length and not with its
    square. `layers` are captured from the context, or from more that begins with it; nothing of it
    is computed again, unless the model keeps states.

    Returns:
        `[num_layers, num_kv_heads, num_tokens]`, 0 to 1, at least float32: the maximum over the
        query group and all queries of the replay.
    """
    num_tokens = len(context)
    again = context if keeps_states(model) else []
    cached = [(layer.key[:, :num_tokens], layer.value[:, :num_tokens]) for layer in layers]
    key = cached[0][0]
    dtype = torch.promote_types(key.dtype, torch.float32)
    scores = key.new_empty(len(layers), len(key), num_tokens, dtype=dtype)
    for chunk in chunks(tokenizer, context, chunk_size):
        first = torch.arange(min(_NUM_FIRST, chunk.start), device=key.device)
        read = torch.cat((first, torch.arange(chunk.start, chunk.stop, device=key.device)))

        def attend(
            index: int,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            scale: float,
            chunk: Chunk = chunk,
            read: torch.Tensor = read,
        ) -> torch.Tensor:
            context_key, context_value = cached[index]
            own = slice(len(again), None)
            most = _most_attention(query[0][:, own], context_key[:, read], key[0][:, own], scale)
            scores[index, :, chunk.start : chunk.stop] = most[:, chunk.start - chunk.stop :]
            if again:
                return causal_attention(query, key, value, scale)
            return _attention(query, (context_key, key[0]), (context_value, value[0]), scale)

        token_ids = again + chunk.token_ids
        positions = torch.arange(len(token_ids)) + num_tokens - len(again)
        with attention_replaced(model, attend):
            model.base_model(
                torch.tensor([token_ids], device=model.device),
                position_ids=positions[None].to(model.device),
                use_cache=False,
            )
    return scores


def replayed(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    layers: list[Layer],
    prompt: Sequence[int],
    evictions: Iterable[EvictionConfig],
) -> torch.Tensor | None:
    """The scores of a prompt, made once for all methods that need them; None if none does."""
    if not any(each.enabled and KNOWN_METHODS[each.method].scorer.replay for each in evictions):
        return None
    return kvzip_scores(model, tokenizer, layers, list(prompt))


def chunks(
    tokenizer: "PreTrainedTokenizerBase", context: list[int], chunk_size: int = CHUNK_SIZE
) -> Iterator[Chunk]:
    """The parts of a context in order, each with what makes the model repeat it."""
    message = "message"
    # What follows it in a chat, up to where the answer begins.
    answer_start = (
        chat(tokenizer, message).rpartition(message)[2] if tokenizer.chat_template else "\n"
    )
    between = encode(tokenizer, answer_start)
    for start in range(0, len(context), chunk_size):
        part = context[start : start + chunk_size]
        cue = context[max(0, start - _CUE_LEN) : start]
        instruction = encode(tokenizer, _REPEAT_PART if start else _REPEAT_ALL) + cue
        yield Chunk(start, start + len(part), instruction + between + part)


def _most_attention(
    query: torch.Tensor, context_key: torch.Tensor, own_key: torch.Tensor, scale: float
) -> torch.Tensor:
    """The most attention that any query pays to each token of the context.

    Args:
        query: `[num_heads, num_queries, head_size]`.
        context_key: `[num_kv_heads, num_context, head_size]`, seen by all queries.
        own_key: `[num_kv_heads, num_queries, head_size]`, seen from their own token on.
        scale: Softmax scale.

    Returns:
        `[num_kv_heads, num_context]`, at least float32.
    """
    num_kv_heads, num_context, head_size = context_key.shape
    num_queries = query.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    rows = query.to(dtype).view(num_kv_heads, -1, num_queries, head_size) * scale
    keys = torch.cat((context_key, own_key), dim=1).to(dtype).transpose(1, 2)
    most = keys.new_full((num_kv_heads, num_context), -torch.inf)
    step = max(1, _BLOCK_ELEMENTS // (query.shape[0] * keys.shape[2]))
    for start in range(0, num_queries, step):
        stop = min(start + step, num_queries)
        logits = rows[:, :, start:stop].flatten(1, 2) @ keys[..., : num_context + stop]
        logits = logits.unflatten(1, (-1, stop - start))
        later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=keys.device).triu(1)
        logits[..., num_context + start :].masked_fill_(later, -torch.inf)
        # Logarithms of the weights: the maximum is all that is wanted of them.
        logits[..., :num_context] -= logits.logsumexp(dim=-1, keepdim=True)
        most = torch.maximum(most, logits[..., :num_context].amax(dim=(1, 2)))
    return most.exp()


def _attention(
    query: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor],
    values: tuple[torch.Tensor, torch.Tensor],
    scale: float,
) -> torch.Tensor:
    """Attention of a replay to the whole context and, causally, to itself."""
    num_context, num_queries = keys[0].shape[1], query.shape[2]
    visible = torch.ones(
        num_queries, num_context + num_queries, dtype=torch.bool, device=query.device
    ).tril(num_context)
    return F.scaled_dot_product_attention(
        query,
        torch.cat(keys, dim=1)[None],
        torch.cat(values, dim=1)[None],
        attn_mask=visible,
        scale=scale,
        enable_gqa=True,
    )
