"""Answers that are given: a logits processor by which vLLM generates them, whatever the model says.

`vllm-kvselect evaluate` starts its server with it, to read answers along. vLLM computes logarithms
of probabilities before it, so these stay the model's.
"""

from collections.abc import Callable

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

KEY = "answer_token_ids"
"""Key of `vllm_xargs`: tokens of the answer."""


class GivenAnswers(AdapterLogitsProcessor):
    """Lets through the next token of a given answer alone; requests without one are left alone."""

    def is_argmax_invariant(self) -> bool:
        """It is not: the likeliest token becomes another one."""
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """What forces a request's tokens, or None if its answer is not given."""
        answer = (params.extra_args or {}).get(KEY)
        if answer is None:
            return None

        def force(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
            token = answer[len(generated)]
            logits.fill_(float("-inf"))
            logits[token] = 0.0
            return logits

        return force
