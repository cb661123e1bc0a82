"""One prompt continued on several choices of its entries, side by side.

The prompt's keys and values are read by all rows of a batch at once; a row sees those that its
choice retained. So every method and budget answers in one batch, at little more than the price of
one. A model that keeps states beside them runs the prompt again with every token, for the states.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vllm_kvselect.offline.attention import attention_replaced, causal_attention, keeps_states
from vllm_kvselect.offline.capture import Layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Continuations:
    """Rows that share a prompt, each with entries and following tokens of its own.

    Args:
        model: The model that `layers` were captured from.
        layers: Captured from the prompt, or from more that begins with it.
        prompt: Its token ids.
        retained: Entries of the prompt that each row sees,
            `[num_rows, num_layers, num_kv_heads, num_prompt_tokens]` bool.
    """

    _own_keys: list[torch.Tensor]
    _own_values: list[torch.Tensor]

    def __init__(
        self,
        model: "PreTrainedModel",
        layers: list[Layer],
        prompt: Sequence[int],
        retained: torch.Tensor,
    ) -> None:
        self._model, self._retained = model, retained
        again = list(prompt) if keeps_states(model) else []
        # What runs again with the next tokens: the prompt and what follows it, or nothing.
        self._again = torch.tensor([again] * len(retained), dtype=torch.long).to(retained.device)
        self._num_again = len(again)
        num_tokens = retained.shape[-1]
        self._keys = [layer.key[:, :num_tokens] for layer in layers]
        self._values = [layer.value[:, :num_tokens] for layer in layers]
        self._hold_nothing()

    @torch.no_grad()
    def run(self, token_ids: torch.Tensor, num_logits: int) -> torch.Tensor:
        """Runs the model over the next tokens of every row, which see those before them.

        Args:
            token_ids: `[num_rows, num_tokens]`.
            num_logits: Of how many of the last tokens the logits are wanted.

        Returns:
            `[num_rows, num_logits, vocabulary_size]`.
        """
        start = self._retained.shape[-1] + self._own_keys[0].shape[2]
        if self._num_again:
            self._again = token_ids = torch.cat((self._again, token_ids), dim=1)
            self._hold_nothing()
            start = 0
        positions = torch.arange(start, start + token_ids.shape[1], device=token_ids.device)
        with attention_replaced(self._model, self._attend):
            return self._model(
                token_ids,
                position_ids=positions.expand_as(token_ids),
                use_cache=False,
                logits_to_keep=num_logits,
            ).logits

    def rewind(self, length: int) -> None:
        """Forgets all following tokens but the first `length`."""
        self._again = self._again[:, : self._num_again + length]
        self._own_keys = [key[:, :, :length] for key in self._own_keys]
        self._own_values = [value[:, :, :length] for value in self._own_values]

    def keep(self, rows: torch.Tensor) -> None:
        """Goes on with some of the rows, given as indices or as a mask."""
        self._retained, self._again = self._retained[rows], self._again[rows]
        self._own_keys = [key[rows] for key in self._own_keys]
        self._own_values = [value[rows] for value in self._own_values]

    def _hold_nothing(self) -> None:
        """Forgets keys and values of the rows' own tokens."""
        num_rows, _, num_kv_heads, _ = self._retained.shape
        key = self._keys[0]
        nothing = key.new_empty(num_rows, num_kv_heads, 0, key.shape[-1])
        self._own_keys = [nothing] * len(self._keys)
        self._own_values = [nothing] * len(self._keys)

    def _attend(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of the row's own tokens behind that of the prompt's, where it runs again."""
        num_again = self._num_again
        again = [each[:, :, :num_again] for each in (query, key, value)]
        query, key, value = (each[:, :, num_again:] for each in (query, key, value))
        self._own_keys[index] = torch.cat((self._own_keys[index], key), dim=2)
        self._own_values[index] = torch.cat((self._own_values[index], value), dim=2)
        output = self._attend_own(index, query * scale)
        if not num_again:
            return output
        return torch.cat((causal_attention(again[0], again[1], again[2], scale), output), dim=2)

    def _attend_own(self, index: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of new tokens to the prompt's retained entries and to the row's own tokens.

        Args:
            index: The layer's place among those that attend.
            query: Scaled, `[num_rows, num_heads, num_new, head_size]`.
        """
        own_key, own_value = self._own_keys[index], self._own_values[index]
        num_rows, num_kv_heads, num_own, head_size = own_key.shape
        num_new, num_prompt = query.shape[2], self._retained.shape[-1]
        # A KV head's queries: [num_rows, num_kv_heads, group * num_new, head_size].
        grouped = query.reshape(num_rows, num_kv_heads, -1, head_size)
        by_head = grouped.transpose(0, 1)

        to_prompt = by_head.flatten(1, 2) @ self._keys[index].transpose(1, 2)
        logits = grouped.new_empty(*by_head.shape[:3], num_prompt + num_own)
        logits[..., :num_prompt] = to_prompt.unflatten(1, by_head.shape[1:3])
        dropped = ~self._retained[:, index].transpose(0, 1)[:, :, None]
        logits[..., :num_prompt].masked_fill_(dropped, -torch.inf)
        logits[..., num_prompt:] = (grouped @ own_key.transpose(2, 3)).transpose(0, 1)
        if num_new > 1:
            later = torch.ones(num_new, num_own, dtype=torch.bool, device=query.device)
            later = later.triu(num_own - num_new + 1)
            logits[..., num_prompt:].unflatten(2, (-1, num_new)).masked_fill_(later, -torch.inf)

        weights = logits.softmax(dim=-1)
        from_prompt = weights[..., :num_prompt].flatten(1, 2) @ self._values[index]
        from_own = weights[..., num_prompt:].transpose(0, 1) @ own_value
        output = from_prompt.unflatten(1, by_head.shape[1:3]).transpose(0, 1) + from_own
        return output.reshape_as(query)
