"""Scores that need the queries of the whole prompt: summed up as its chunks are prefilled.

The sums live with the request's prompt (`prompts.py`), from its first chunk to its last. None of
their tokens may come from the prefix cache, since their queries would be missing.
"""

from dataclasses import dataclass

import torch

from vllm_kvselect.engine.prompts import Prompt
from vllm_kvselect.kernels.base import Scorer
from vllm_kvselect.methods import METHODS, Accumulator


@dataclass
class PromptChunk:
    """Prompt tokens of a batch whose queries are to be added to their prompt's sums.

    Attributes:
        accumulator: What a chunk adds.
        sums: The prompt's sums, `[num_layers, num_kv_heads, num_prompt_tokens]` float32.
        blocks: Block ids up to the chunk's end, int64.
        tokens: The tokens in the batch.
        first_position: Position of the first of them in the prompt.
    """

    accumulator: Accumulator
    sums: torch.Tensor
    blocks: torch.Tensor
    tokens: slice
    first_position: int

    @property
    def end(self) -> int:
        """Position after the chunk's last token."""
        return self.first_position + self.tokens.stop - self.tokens.start

    def add(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> None:
        """Adds the chunk to the sums of one layer.

        Args:
            layer_index: The layer's place in the group.
            query: Queries of the batch, `[num_tokens, num_heads, head_size]`.
            key: Keys up to the chunk's end, `[num_kv_heads, end, head_size]`.
            scale: Softmax scale of the layer.
            sinks: Attention sinks of the layer, `[num_heads]`, or None.
        """
        added = self.accumulator(query[self.tokens], key, self.first_position, scale, sinks)
        self.sums[layer_index, :, : self.end] += added


def prompt_chunk(
    prompt: Prompt,
    tokens: slice,
    first_position: int,
    blocks: torch.Tensor,
    num_layers: int,
    num_kv_heads: int,
) -> PromptChunk | None:
    """Opens a prompt's sums at its first chunk, and continues them at the later ones.

    Args:
        prompt: The prompt.
        tokens: Its tokens in the batch.
        first_position: Position of the first of them in the prompt.
        blocks: Block ids up to the chunk's end, int64.
        num_layers: Layers of the group.
        num_kv_heads: KV heads on this rank.

    Returns:
        The chunk, or None if the prompt's method does without.

    Raises:
        RuntimeError: If tokens before the chunk were not computed here: their queries are missing.
    """
    accumulator = METHODS[prompt.eviction.method].accumulator
    if accumulator is None:
        return None
    if first_position == 0:  # also when a preempted request begins again
        shape = num_layers, num_kv_heads, prompt.num_tokens
        prompt.sums = torch.zeros(shape, device=blocks.device)
        prompt.num_summed = 0
    if prompt.sums is None or prompt.num_summed != first_position:
        raise RuntimeError(
            f"{prompt.eviction.method} has summed {prompt.num_summed} tokens of a prompt that goes "
            f"on at {first_position}"
        )
    chunk = PromptChunk(accumulator, prompt.sums, blocks, tokens, first_position)
    prompt.num_summed = chunk.end
    return chunk


def scorer_of(sums: torch.Tensor, window: int) -> Scorer:
    """A scorer that has its scores already.

    Args:
        sums: The complete sums of one layer, `[num_kv_heads, num_prompt_tokens]`.
        window: Observation window, whose columns are cut off.

    Returns:
        What the method calls in place of its own scorer.
    """
    scores = sums[:, : sums.shape[1] - window]
    return lambda *_: scores
