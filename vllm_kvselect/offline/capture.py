"""Queries, keys and values of every layer.

They are taken in transformers' public registry of attention functions (`attention.py`), so any
causal language model that uses it will do, as long as its layers attend plainly.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_kvselect.offline.attention import (
    OutputProjections,
    attending_layers,
    attention_replaced,
    causal_attention,
)
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.rotations import LayerRotation, UnknownRotation, find_rotations
from vllm_kvselect.scoring.value_norms import OutputProjection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Layer(NamedTuple):
    """What one layer's attention reads, positions applied.

    Attributes:
        query: `[num_tokens, num_heads, head_size]`, head `h` reads KV head `h // group`.
        key: `[num_kv_heads, num_tokens, head_size]`.
        value: `[num_kv_heads, num_tokens, head_size]`.
        scale: Softmax scale.
        projection: W_O by KV head; None where something, such as a gate, comes before it.
        rotation: How positions were applied to queries and keys.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    projection: OutputProjection | None
    rotation: LayerRotation = None

    @property
    def output_projection(self) -> OutputProjection:
        """W_O, for whom needs it.

        Raises:
            EvaluationError: If nothing reads the attention's output as it is.
        """
        if self.projection is None:
            raise EvaluationError("a layer does not project its attention's output directly")
        return self.projection


@torch.no_grad()
def capture(model: "PreTrainedModel", token_ids: list[int]) -> list[Layer]:
    """Runs the model over all tokens with the full cache and keeps what its attention reads.

    The layers that attend come in order.

    Raises:
        EvaluationError: If a layer's attention is not plain.
    """
    read: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]] = {}

    def record(
        index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        read[index] = (query[0].transpose(0, 1).contiguous(), key[0], value[0], scale)
        return causal_attention(query, key, value, scale)

    with OutputProjections() as projections, attention_replaced(model, record, projections.watch):
        model.base_model(torch.tensor([token_ids], device=model.device), use_cache=False)
    num_layers = len(attending_layers(model))
    if sorted(read) != list(range(num_layers)) or len({read[i][1].shape for i in read}) != 1:
        raise EvaluationError(
            f"{type(model).__name__} runs {len(read)} of its {num_layers} attending layers through "
            "transformers' attention registry, or their KV heads differ; the analysis needs a "
            "model whose layers all attend in the same way"
        )
    rotations = find_rotations(model, token_ids)
    unknown = UnknownRotation("the model takes no positions")
    layers = []
    for index, (query, key, value, scale) in sorted(read.items()):
        is_known = projections.knows(index)
        projection = projections.of(index, query, key.shape[0]) if is_known else None
        rotation = rotations.get(index, unknown)
        layers.append(Layer(query, key, value, scale, projection, rotation))
    return layers
