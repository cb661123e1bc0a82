"""Answers that are given: a logits processor by which vLLM generates them, whatever the model says.

`vllm-kvselect evaluate` starts its server with it, to read answers along. vLLM computes logarithms
of probabilities before it, so these stay the model's.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor

KEY = "answer_token_ids"
"""Key of `vllm_xargs`: tokens of the answer."""


class GivenAnswers(AdapterLogitsProcessor, LogitsProcessor):
    """Lets through the next token of a given answer alone; requests without one are left alone.

    One class for both model runners, each of which wants its own base class and arguments: of V1
    the device and whether memory is pinned, of V2 the state of its requests.
    """

    def __init__(self, vllm_config: VllmConfig, *given: Any) -> None:
        self._answers: dict[int, list[int] | None] = {}
        if len(given) == 1:
            (self._requests,) = given
        else:
            super().__init__(vllm_config, *given)

    def is_argmax_invariant(self) -> bool:
        """It is not: the likeliest token becomes another one."""
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """V1: what forces a request's tokens, or None if its answer is not given."""
        answer = _answer(params)
        if answer is None:
            return None
        return lambda generated, logits: _force(logits, answer[len(generated)])

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """V2: takes the answer of a request that enters a slot; whether it has one."""
        self._answers[req_idx] = _answer(sampling_params)
        return self._answers[req_idx] is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Forces the next token in each row of a request with an answer; in V2 a row is one's."""
        if ctx is None:
            return super().apply(logits)
        rows = zip(ctx.idx_mapping_np.tolist(), ctx.seq_lens_upper_bound_np.tolist(), strict=True)
        for row, (slot, seq_len) in enumerate(rows):
            if (answer := self._answers.get(slot)) is not None:
                place = seq_len - int(self._requests.prompt_len.np[slot])
                if 0 <= place < len(answer):  # else a prompt's chunk, whose token nobody reads
                    _force(logits[row], answer[place])
        return logits


def _answer(params: SamplingParams) -> list[int] | None:
    return (params.extra_args or {}).get(KEY)


def _force(logits: torch.Tensor, token: int) -> torch.Tensor:
    logits.fill_(float("-inf"))
    logits[token] = 0.0
    return logits
