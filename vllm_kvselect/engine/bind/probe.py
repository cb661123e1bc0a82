"""Binds each attention layer to its part of the model's calibrated probe."""

from collections.abc import Iterable

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.log import logger
from vllm_kvselect.probes.fingerprint import fingerprint
from vllm_kvselect.probes.places import find_probe
from vllm_kvselect.scoring.probe import num_features


def find_probes(
    vllm_config: VllmConfig,
    file: str | None,
    layers: Iterable[tuple[str, Attention]],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Reads the model's probe, of a file or the one that fits its weights, which are here by then.

    Returns:
        By the layer's name, the part of its own KV heads, `[num_features, num_kv_heads]`.

    Raises:
        ConfigError: If there is no probe, or it does not fit; with the reason and what to do.
    """
    model = vllm_config.model_config
    name = model.model
    try:
        own = fingerprint(name, model.revision, vllm_config.load_config.download_dir)
        probe, path = find_probe(name, own, file)
        found = {}
        for layer_name, layer in layers:
            weights = probe.of_layer(extract_layer_index(layer_name))
            found[layer_name] = _own_heads(weights, layer, model.get_total_num_kv_heads())
    except ConfigError as error:
        raise ConfigError(f"methods that need a calibrated probe cannot be used: {error}") from None
    facts = probe.facts.quality
    logger.info(
        "KV eviction reads the probe %s, made from %d tokens (repeats texts %.3f nats a token "
        "from the full cache at %.2f%%)",
        path,
        facts.num_tokens,
        facts.tuned[-1],
        100 * facts.budgets[-1],
    )
    return {layer: part.to(device) for layer, part in found.items()}


def _own_heads(weights: torch.Tensor, layer: Attention, num_kv_heads: int) -> torch.Tensor:
    """The part of a layer's probe that is of this rank's KV heads."""
    expected = num_features(layer.head_size), num_kv_heads
    if tuple(weights.shape) != expected:
        raise ConfigError(
            f"a layer's probe has the shape {tuple(weights.shape)} and this rank's heads need "
            f"{expected}; with tensor parallelism, take no more ranks than there are KV heads "
            f"({num_kv_heads})"
        )
    first = get_tensor_model_parallel_rank() * layer.num_kv_heads
    # In memory a head's weights are neighbours, as the kernels read them at every cut.
    return weights[:, first : first + layer.num_kv_heads].T.contiguous().T
