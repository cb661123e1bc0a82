"""Forces the tokens a request generates, while vLLM reports how likely the model found them.

Teacher forcing in a prompt would prefill the answer, and the entries of a prompt are dropped after
its prefill only. Here every answer token is decoded, so it sees the cache after the drop. vLLM
reports `raw_logprobs`, taken before any logits processor runs: they are the model's own.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm import EngineArgs, SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

EXTRA_ARGUMENT = "forced_token_ids"


class ForcedTokens(AdapterLogitsProcessor):
    """Lets a request generate nothing but the tokens of its `forced_token_ids`, in order."""

    def is_argmax_invariant(self) -> bool:
        """Greedy sampling is what this changes."""
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """Returns the function that leaves one token of the logits standing at each step."""
        forced = (params.extra_args or {}).get(EXTRA_ARGUMENT)
        if forced is None:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) < len(forced):
                logits.fill_(float("-inf"))
                logits[forced[len(output_ids)]] = 0.0
            return logits

        return force


def forcing(
    arguments: dict[str, Any],
) -> tuple[dict[str, Any], Callable[[list[int]], SamplingParams]]:
    """Chooses how to force tokens: by trace replay in Model Runner V2, else by a logits processor.

    Args:
        arguments: The engine arguments, which decide the model runner.

    Returns:
        The engine arguments with forcing enabled, and a function that makes the sampling
        parameters for one answer.
    """
    replays = EngineArgs(**arguments).create_engine_config().use_v2_model_runner
    more = {"enable_trace_replay": True} if replays else {"logits_processors": [ForcedTokens]}

    def parameters(answer: list[int]) -> SamplingParams:
        forced: dict[str, Any] = (
            {"trace_decode_token_ids": answer}
            if replays
            else {"extra_args": {EXTRA_ARGUMENT: answer}}
        )
        return SamplingParams(
            temperature=0.0,
            max_tokens=len(answer),
            ignore_eos=True,
            detokenize=False,
            logprobs=1,  # of the forced token and of the likeliest one
            **forced,
        )

    return {**arguments, **more}, parameters
