"""KeyDiff (arXiv 2504.15364): keys that are unlike the others."""

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.inputs import ScoringInputs


def keydiff_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Scores every entry before the window by how little its key resembles the prompt's keys.

    One minus the cosine of the key to the anchor, the mean of all normalised keys of the head. The
    paper's score is minus the cosine: the order is the same, and
    these are not negative. No query is read, so a later question cannot change what is retained.

    Returns:
        `[num_kv_heads, num_tokens - window]`, 0 to 2, at least float32.
    """
    key = inputs.key.to(torch.promote_types(inputs.key.dtype, torch.float32))
    if (is_absent := inputs.is_absent) is not None:
        # Not their weights in the sum: what is in their place need not be a number.
        key = key.masked_fill(is_absent[..., None], 0)
    lengths = _lengths(key)
    # The sum points where the mean does, whatever the number of entries. It and the cosines are
    # products, so that no normalised key is ever written.
    anchor = lengths.reciprocal()[:, None] @ key
    anchor /= _lengths(anchor)[..., None]
    scored = slice(inputs.num_scored)
    cosines = (key[:, scored] @ anchor.mT).squeeze(2) / lengths[:, scored]
    return (1 - cosines).clamp_(min=0)


def _lengths(vectors: torch.Tensor) -> torch.Tensor:
    """L2 norms, `[..., n]` of `[..., n, d]`, by which anything may be divided."""
    lengths: torch.Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return lengths.clamp_(min=1e-12)
