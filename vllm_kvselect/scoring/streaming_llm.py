"""StreamingLLM (arXiv 2309.17453): the first tokens and the latest ones, whatever they say."""

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.inputs import ScoringInputs


def streaming_llm_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Scores by position: sinks before everything, then the later the better.

    Args:
        inputs: Only shapes are read.
        config: Gives `num_sinks`.

    Returns:
        `[num_kv_heads, num_tokens - window]`, float32.
    """
    num_scored = inputs.num_scored
    scores = torch.arange(num_scored, dtype=torch.float32, device=inputs.key.device)
    scores[: config.num_sinks].fill_(num_scored)
    return scores.expand(inputs.key.shape[0], -1)
