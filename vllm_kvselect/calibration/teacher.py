"""What a probe reads of a text, and what it should say about it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from vllm_kvselect.calibration.settings import CalibrationConfig
from vllm_kvselect.offline.capture import Layer, capture
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.kvzip import kvzip_scores
from vllm_kvselect.offline.rotations import UnknownRotation
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.probe import probe_features
from vllm_kvselect.scoring.value_norms import projected_value_norms

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def samples(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    context: list[int],
    config: CalibrationConfig,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Features and targets of a text, layer by layer.

    The target is the geometric mean of KVzip's score and of that score times the norm of the
    projected value, an entry's part of the bound on what the output changes by (arXiv 2502.03805,
    Theorem 2). Without norms, layers whose values add much come short, and with them the words of a
    list cannot be counted. With norms alone, others do, and prose is repeated less well.

    Yields:
        Features `[num_kv_heads, num_tokens, num_features]` and logarithms of the target
        `[num_kv_heads, num_tokens]`.

    Raises:
        EvaluationError: If the model does not attend plainly, or its rotations are not known.
    """
    layers = capture(model, context)
    scores = kvzip_scores(model, tokenizer, layers, context, config.chunk_size)
    # Layers are compared with each other: all have norms, or none has.
    has_norms = all(layer.projection is not None for layer in layers)
    for layer, features, target in zip(layers, features_of(layers), scores, strict=True):
        if has_norms:
            target *= projected_value_norms(layer.value, layer.output_projection).sqrt()
        yield features, logarithm(target)


def features_of(layers: list[Layer]) -> Iterator[torch.Tensor]:
    """What a probe reads of a captured text, `[num_kv_heads, num_tokens, num_features]` a layer.

    Raises:
        EvaluationError: If the model's rotations are not known.
    """
    for layer in layers:
        if isinstance(layer.rotation, UnknownRotation):
            raise EvaluationError(
                "a probe reads keys as they were before their positions, and of this model "
                f"they are not known: {layer.rotation.reason}"
            )
        inputs = ScoringInputs(
            layer.query, layer.key, layer.value, layer.scale, rotation=layer.rotation
        )
        yield probe_features(inputs)


def logarithm(scores: torch.Tensor) -> torch.Tensor:
    """The logarithm of scores, of the same shape; finite, also of 0."""
    return scores.clamp(min=torch.finfo(scores.dtype).tiny).log()
