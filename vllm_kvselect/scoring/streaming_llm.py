"""StreamingLLM (arXiv 2309.17453): the first tokens and the latest ones, whatever they say."""

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.inputs import ScoringInputs


def streaming_llm_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Scores by position: the later the better. The first tokens are not said to be better here.

    Returns:
        `[num_kv_heads, num_tokens - window]`, float32.
    """
    num_kv_heads, num_scored = inputs.key.shape[0], inputs.num_scored
    places = torch.arange(num_scored, device=inputs.key.device, dtype=torch.float32)
    return places.repeat(num_kv_heads, 1)
