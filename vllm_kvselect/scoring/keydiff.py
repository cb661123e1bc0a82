"""KeyDiff (arXiv 2504.15364): keys that are unlike the others."""

import torch
import torch.nn.functional as F

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.inputs import ScoringInputs


def keydiff_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Scores every entry before the window by how little its key resembles the prompt's keys.

    One minus the cosine of the key to the anchor, the mean of all normalised keys of the head. The
    paper's score is minus the cosine: the order is the same, and
    these are not negative. No query is read, so a later question cannot change what is retained.

    Args:
        inputs: The prompt's keys.
        config: Has no parameter for it.

    Returns:
        `[num_kv_heads, num_tokens - window]`, 0 to 2, at least float32.
    """
    key = inputs.key.to(torch.promote_types(inputs.key.dtype, torch.float32))
    directions = F.normalize(key, dim=-1)
    if (is_absent := inputs.is_absent) is not None:
        directions = directions.masked_fill(is_absent[..., None], 0)
    # The sum points where the mean does, whatever the number of entries.
    anchor = directions.sum(dim=1, keepdim=True)
    cosines = F.cosine_similarity(key[:, : inputs.num_scored], anchor, dim=-1)
    return (1 - cosines).clamp_(min=0)
