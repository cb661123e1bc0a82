"""Splits the batches of a drafter, whose layers lie in the group of its target's.

A drafter is computed once the step's tokens are sampled, several times over. Its first batch has
the step's tokens, each further one a drafted token of every request. It asks for metadata itself,
but for the first batch of EAGLE and MTP in model runner V2, which is the step's.
"""

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvselect.engine.step.split import Splitter


class DraftSplitter(Splitter):
    """Lets a drafter read what is packed, and everything of requests that have nothing packed yet.

    It chooses nothing, so nothing of it is seen.
    """

    chooses = False

    def _seq_lens(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Bounds: what vLLM says of a drafter's rows on the host may be too little by its token."""
        return torch.full((common.num_reqs,), common.max_seq_len, dtype=torch.int32)
