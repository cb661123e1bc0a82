"""Key norms (arXiv 2406.11430): keys of low norm are those that get much attention."""

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.inputs import ScoringInputs


def knorm_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Scores every entry before the window by how short its key is.

    `1 / (1 + norm)`. The paper's score is minus the L2 norm: the order is the same, and these are
    not negative. No query is read, so a later question cannot change what is retained.

    Returns:
        `[num_kv_heads, num_tokens - window]`, above 0 and up to 1, at least float32.
    """
    key = inputs.key[:, : inputs.num_scored]
    dtype = torch.promote_types(key.dtype, torch.float32)
    norms: torch.Tensor = torch.linalg.vector_norm(key, dim=-1, dtype=dtype)
    return 1 / (1 + norms)
