"""KVzip (arXiv 2505.23416): what it takes to repeat the text, from a replay that was made before.

The replay is a second prefill (`offline/kvzip.py`), so this is no method to serve: it is the
teacher of the probe, and what the probe is measured against.
"""

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.inputs import ScoringInputs


def replay_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    """Scores entries by the most attention that the replay pays them.

    Returns:
        `[num_kv_heads, n]` for those of the tokens before the window that values cover.
    """
    assert inputs.replayed is not None
    num_tokens = min(inputs.key.shape[1] - config.window, inputs.value.shape[1])
    return inputs.replayed[:, :num_tokens]
