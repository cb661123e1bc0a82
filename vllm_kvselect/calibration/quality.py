"""How good a probe is on texts that it was not made from."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from vllm_kvselect.calibration.repetition import divergence, repeated
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.offline.capture import capture
from vllm_kvselect.offline.kvzip import chunks
from vllm_kvselect.offline.retained import Prompt, retained_entries

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BUDGETS: Final = (1 / 8, 1 / 16)
"""At which probes are judged."""


def divergences(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    context: list[int],
    probes: Sequence[torch.Tensor],
    part: int,
) -> torch.Tensor:
    """How far the model is from the full cache while it repeats a text from what probes retain.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        context: Token ids of the text.
        probes: Weights, `[num_layers, num_features, num_kv_heads]` each.
        part: Tokens that are repeated in one go.

    Returns:
        Nats a token, `[num_probes, len(BUDGETS)]`: the mean over all of the text.

    Raises:
        EvaluationError: If the model does not attend plainly, or its rotations are not known.
    """
    layers = capture(model, context)
    ways = [
        retained_entries(
            Prompt(layers, len(context), block_size=1, probe=probe),
            EvictionConfig(method="layer-probe", budget=budget, window=1),
        )
        for probe in probes
        for budget in BUDGETS
    ]
    retained = torch.stack([torch.ones_like(ways[0]), *ways])
    log_gates = torch.zeros(retained.shape, device=retained.device).masked_fill(
        ~retained, -torch.inf
    )
    total = torch.zeros(len(ways), dtype=torch.float64)
    with torch.no_grad():
        for chunk in chunks(tokenizer, context, part):
            full, *logits = repeated(model, layers, context, chunk, log_gates)
            total += divergence(torch.stack(logits), full).sum(dim=-1).double().cpu()
    return (total / len(context)).view(len(probes), len(BUDGETS))
