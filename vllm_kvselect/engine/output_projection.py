"""Binds each attention layer to its output projection, which vLLM's layers do not know."""

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear

from vllm_kvselect.config import ConfigError
from vllm_kvselect.scoring.value_norms import OutputProjection


def find_output_projections(model: nn.Module) -> dict[str, RowParallelLinear]:
    """Finds the projection that reads each attention layer's output.

    It is the row-parallel linear layer beside the attention layer in the model's tree whose input
    is as wide as the attention's output.

    Args:
        model: A loaded model.

    Returns:
        Output projections by the attention layer's name.

    Raises:
        ConfigError: If a layer has none or several.
    """
    modules = dict(model.named_modules())
    found = {}
    for name, attention in modules.items():
        if not isinstance(attention, Attention):
            continue
        width = attention.num_heads * attention.head_size_v
        # With LoRA, vLLM wraps every linear layer; the one inside has the model's own weights.
        siblings = (
            getattr(module, "base_layer", module)
            for module in modules[name.rpartition(".")[0]].children()
        )
        candidates = [
            module
            for module in siblings
            if isinstance(module, RowParallelLinear) and module.input_size_per_partition == width
        ]
        if len(candidates) != 1:
            raise ConfigError(
                f"found {len(candidates)} output projections for {name} of {type(model).__name__}, "
                "not one; use a method without '-perturb'"
            )
        found[attention.layer_name] = candidates[0]
    return found


@torch.no_grad()
def materialise(
    layer: LinearBase, num_kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> OutputProjection:
    """Computes a projection's matrix through its own forward, so quantised weights work too.

    The quantisation method is applied directly: without the bias and, under tensor parallelism,
    without the all-reduce, since a head's norm needs only the rows of its own rank.

    Args:
        layer: The output projection, loaded.
        num_kv_heads: KV heads on this rank.
        head_size: Elements per value.
        dtype: Activation dtype.
        device: Where the layer lives.

    Returns:
        The projection by KV head.
    """
    identity = torch.eye(layer.input_size_per_partition, dtype=dtype, device=device)
    matrix = layer.quant_method.apply(layer, identity)
    by_head = matrix.view(num_kv_heads, -1, head_size, matrix.shape[-1])
    return OutputProjection.of(by_head.transpose(1, 2).contiguous())
