"""StreamingLLM (arXiv 2309.17453): the first tokens and the latest ones, whatever they say."""

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scorers import FirstTokens
from vllm_kvselect.scoring.inputs import ScoringInputs


def streaming_llm_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Scores by position: sinks before everything, then the later the better.

    Args:
        inputs: Only shapes are read.
        config: Gives `num_sinks`.

    Returns:
        `[num_kv_heads, num_tokens - window]`, float32.
    """
    num_kv_heads, num_scored = inputs.key.shape[0], inputs.num_scored
    places = torch.arange(num_scored, device=inputs.key.device).expand(num_kv_heads, -1)
    if inputs.num_absent is not None:
        places = places - inputs.num_absent[:, None]
    is_first = places < config.of(FirstTokens).num_sinks
    return torch.where(is_first, num_scored, places).to(torch.float32)
