"""Answers that are given: vLLM generates them whatever the model says, and tells what it said."""

from collections.abc import Callable

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

FORCED = "answer_token_ids"
"""Key of `SamplingParams.extra_args`: tokens of the answer."""


class ForcedTokens(AdapterLogitsProcessor):
    """Lets through the next token of a given answer alone.

    vLLM computes logarithms of probabilities before it, so they stay the model's.
    """

    def is_argmax_invariant(self) -> bool:
        """It is not: the likeliest token becomes another one."""
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """What forces a request's tokens, or None if its answer is not given."""
        answer = (params.extra_args or {}).get(FORCED)
        if answer is None:
            return None

        def force(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
            token = answer[len(generated)]
            logits.fill_(float("-inf"))
            logits[token] = 0.0
            return logits

        return force
