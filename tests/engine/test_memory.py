"""The caches of all layers are one cache, or are refused."""

import pytest
import torch

from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.view.memory import all_layers, refuse_scattered_layers

NUM_BLOCKS, NUM_KV_HEADS = 12, 3


def layers_of(memory: torch.Tensor, num_layers: int) -> list[torch.Tensor]:
    """Caches of layers that lie one after the other."""
    return list(memory.view(num_layers, -1, *memory.shape[1:]))


def test_all_layers_are_one_cache_seen_from_any_of_them() -> None:
    memory = torch.randn(3 * NUM_BLOCKS, NUM_KV_HEADS, 32, 8)
    layers = layers_of(memory, 3)
    refuse_scattered_layers(layers)
    for layer in layers:
        assert torch.equal(all_layers(layer), memory)
        assert all_layers(layer).data_ptr() == memory.data_ptr()
    layers[2][5, 1] = 7
    assert (all_layers(layers[0])[2 * NUM_BLOCKS + 5, 1] == 7).all()


@pytest.mark.parametrize("name", ["order", "gap", "block-outermost", "elsewhere"])
def test_layers_that_lie_elsewhere_are_refused(name: str) -> None:
    memory = torch.zeros(4 * NUM_BLOCKS, NUM_KV_HEADS, 32, 8)
    layers = layers_of(memory, 4)
    scattered = {
        "order": [layers[1], layers[0]],
        "gap": [layers[0], layers[2]],
        "block-outermost": list(memory.view(NUM_BLOCKS, 4, *memory.shape[1:]).unbind(1)),
        "elsewhere": [layers[0], layers[1].clone()],
    }
    with pytest.raises(ConfigError, match=r"of layer [01] is elsewhere"):
        refuse_scattered_layers(scattered[name])
