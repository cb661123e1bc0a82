"""A probe fitted to its teacher, text by text."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from vllm_kvselect.calibration.normal_equations import NormalEquations, Spread
from vllm_kvselect.calibration.settings import CalibrationConfig
from vllm_kvselect.calibration.teacher import samples

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def fit(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    contexts: Sequence[list[int]],
    config: CalibrationConfig,
    done: Callable[[], None] = lambda: None,
) -> tuple[torch.Tensor, Spread]:
    """Fits a probe of every layer.

    One text is alive at a time. What is kept of it are sums: for every KV head as many as the
    square of its number of features, in float64. `done` is called after each text.

    Returns:
        Weights, `[num_layers, num_features, num_kv_heads]` float32, and the features' spread.

    Raises:
        EvaluationError: If the model does not attend plainly, or its rotations are not known.
    """
    equations: list[NormalEquations] = []
    for context in contexts:
        for index, (features, targets) in enumerate(samples(model, tokenizer, context, config)):
            if index == len(equations):
                num_heads, _, num_features = features.shape
                equations.append(NormalEquations(num_heads, num_features, features.device))
            equations[index].add(features, targets)
        done()
    weights = torch.stack([each.solve(config.ridge) for each in equations]).float()
    spreads = zip(*(each.spread() for each in equations), strict=True)
    return weights, Spread(*(torch.stack(part) for part in spreads))
