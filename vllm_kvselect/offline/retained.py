"""What the package's own methods retain of a captured prompt. No second implementation of them."""

from typing import NamedTuple

import torch

from vllm_kvselect.choice import retain
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels.base import REFERENCES, Kernels
from vllm_kvselect.offline.capture import Layer
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.rotations import UnknownRotation
from vllm_kvselect.planning.cuts import Cut, cuts
from vllm_kvselect.registry import KNOWN_METHODS
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.rotation import Rotation


class Prompt(NamedTuple):
    """A captured prompt and how to look at it.

    Attributes:
        layers: Captured from the prompt and from what follows it.
        num_tokens: Length of the prompt.
        block_size: Tokens per block: 1 counts a budget in entries as papers do, 32 is the engine's.
        kernels: What computes the parts of a choice.
        probe: The model's calibrated probe, `[num_layers, num_features, num_kv_heads]`, for methods
            that need it.
        replayed: KVzip's scores of the prompt, `[num_layers, num_kv_heads, num_prompt_tokens]`, for
            methods that need them.
    """

    layers: list[Layer]
    num_tokens: int
    block_size: int
    kernels: Kernels = REFERENCES
    probe: torch.Tensor | None = None
    replayed: torch.Tensor | None = None

    def cut(self, config: EvictionConfig) -> Cut | None:
        """The cut that the prompt's last token makes, or an earlier one."""
        return cuts(self.num_tokens, self.block_size, config).last_made(self.num_tokens)


def retained_entries(prompt: Prompt, config: EvictionConfig) -> torch.Tensor:
    """Chooses from the full cache's queries, keys and values of every layer.

    Returns:
        `[num_layers, num_kv_heads, num_prompt_tokens]` bool. All of it if the budget covers it.

    Raises:
        EvaluationError: If the method needs the layers' rotations, and they are not known.
    """
    retained = tail_entries(prompt, config)
    if (cut := prompt.cut(config)) is not None:
        layers = competing(prompt, cut, config)
        retention = retain(layers, cut.num_packed, prompt.block_size, config, prompt.kernels)
        chosen = retained[..., : cut.tail_start * prompt.block_size]
        is_chosen = torch.zeros_like(chosen).flatten()
        is_chosen[retention.retained] = True
        chosen.copy_(is_chosen.view_as(chosen))
    return retained


def tail_entries(prompt: Prompt, config: EvictionConfig) -> torch.Tensor:
    """Entries that no method drops: from the tail on, or all if the budget covers the prompt.

    Returns:
        `[num_layers, num_kv_heads, num_prompt_tokens]` bool.
    """
    cut = prompt.cut(config)
    start = 0 if cut is None else cut.tail_start * prompt.block_size
    key = prompt.layers[0].key
    tail = torch.arange(prompt.num_tokens, device=key.device) >= start
    return tail.repeat(len(prompt.layers), key.shape[0], 1)


def competing(prompt: Prompt, cut: Cut, config: EvictionConfig) -> list[ScoringInputs]:
    """What a method reads of every layer at a cut; what is before the tail competes."""
    method = KNOWN_METHODS[config.method]
    window = slice(None) if method.scorer.whole_prompt else slice(-config.window, None)
    scored = cut.tail_start * prompt.block_size
    return [
        ScoringInputs(
            layer.query[: prompt.num_tokens][window],
            layer.key[:, : prompt.num_tokens],
            layer.value[:, :scored],
            layer.scale,
            layer.output_projection,
            layer_index=index,
            rotation=_rotation(layer, config) if "rotation" in method.needs else None,
            probe=None if prompt.probe is None else prompt.probe[index].to(layer.key.device),
            replayed=None if prompt.replayed is None else prompt.replayed[index],
        )
        for index, layer in enumerate(prompt.layers)
    ]


def _rotation(layer: Layer, config: EvictionConfig) -> Rotation | None:
    if isinstance(layer.rotation, UnknownRotation):
        raise EvaluationError(
            f"{config.method} needs queries as they were before their positions, and of this model "
            f"they are not known: {layer.rotation.reason}; leave this method out"
        )
    return layer.rotation
