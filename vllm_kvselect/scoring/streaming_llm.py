"""StreamingLLM (arXiv 2309.17453): the first tokens and the latest ones, whatever they say."""

import torch

from vllm_kvselect.config import EvictionConfig


def streaming_llm_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    config: EvictionConfig,
    layer_index: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores by position: sinks before everything, then the later the better.

    Args:
        query: `[window, num_heads, head_size]`, only its length is read.
        key: `[num_kv_heads, num_prompt_tokens, head_size]`, only its shape is read.
        scale: Unused; every scorer has this signature.
        config: Gives `num_sinks`.
        layer_index: Unused.
        sinks: Unused.

    Returns:
        `[num_kv_heads, num_prompt_tokens - window]`, float32.
    """
    num_kv_heads, num_prompt_tokens, _ = key.shape
    num_scored = num_prompt_tokens - query.shape[0]
    scores = torch.arange(num_scored, dtype=torch.float32, device=key.device)
    scores[: config.num_sinks].fill_(num_scored)
    return scores.expand(num_kv_heads, -1)
