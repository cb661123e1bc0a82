"""What the layers of a worker's model are bound to: whatever methods need of them."""

from abc import ABC
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

from vllm_kvselect.config import ConfigError, EvictionConfig
from vllm_kvselect.engine.bind.output_projection import find_output_projections, materialise
from vllm_kvselect.engine.bind.probe import find_probes
from vllm_kvselect.engine.bind.rotation import find_rotations
from vllm_kvselect.engine.log import logger
from vllm_kvselect.engine.step.layer import HeadwiseImpl
from vllm_kvselect.registry import METHODS, best_method
from vllm_kvselect.scorers import Need, ProbeFile
from vllm_kvselect.scoring.value_norms import OutputProjection


class BindingWorker(ABC):
    """A worker that binds the layers of its model, and knows what these cannot give."""

    vllm_config: VllmConfig
    model_config: ModelConfig
    device: torch.device
    model_runner: Any
    use_v2_model_runner: bool
    _eviction: EvictionConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._problems: dict[Need, str] = {}

    def kv_eviction_problems(self) -> dict[Need, str]:
        """What methods need and cannot have with this model, and why: requests are refused them."""
        return self._problems

    def _bind_layers(self) -> None:
        """Gives the layers of the loaded model what methods need that requests may have.

        Without it, only a default method's need is an error, and what the operator asked for.
        """
        for need, bind in self._binds.items():
            if not any(need in METHODS[name].needs for name in self._methods()):
                continue
            try:
                bind()
            except ConfigError as error:
                if need == "probe" and self._eviction.of(ProbeFile).probe is not None:
                    raise
                default = METHODS.get(self._eviction.method)
                if default is not None and need in default.needs:
                    raise ConfigError(f"{error}; {self._next_best(need)}") from None
                self._problems[need] = str(error)
                logger.warning("%s; requests that choose them are refused", error)

    @property
    def _binds(self) -> dict[Need, Callable[[], None]]:
        """What gives layers each thing that a method may need."""
        return {
            "output projection": self._bind_output_projections,
            "rotation": self._bind_rotations,
            "probe": self._bind_probes,
        }

    def _methods(self) -> list[str]:
        """Methods that a request may run with, by default or by its own choice."""
        if "method" not in self._eviction.allow_override:
            return [self._eviction.method] if self._eviction.enabled else []
        missing = self._problems.keys()
        return [name for name, method in METHODS.items() if method.needs.isdisjoint(missing)]

    @cached_property
    def _of_drafter(self) -> frozenset[str]:
        """Names of the attention layers of a drafter; none where it has no layers."""
        if self.use_v2_model_runner:
            return frozenset(getattr(self.model_runner.speculator, "draft_attn_layer_names", ()))
        drafter = getattr(self.model_runner, "drafter", None)
        return frozenset(getattr(drafter, "_draft_attn_layer_names", ()))

    def _prepared(self, projection: OutputProjection) -> OutputProjection:
        """A layer's W_O as the kernels want it."""
        return projection

    def _next_best(self, missing: Need) -> str:
        """What to take without something that a method needs, and the model cannot give."""
        given = {need for need, bind in self._binds.items() if need != missing and _succeeds(bind)}
        in_rounds = bool(self._eviction.decode_budget or self._eviction.prompt_interval)
        pools = self.vllm_config.parallel_config.pipeline_parallel_size == 1
        name = best_method(
            lambda method: (
                method.needs <= given
                and (method.in_rounds or not in_rounds)
                and (pools or not method.pooled)
            )
        )
        return f"the best without it is --kv-eviction {name}"

    def _bind_output_projections(self) -> None:
        """Gives each layer its W_O."""
        dtype = self.model_config.dtype
        projections = find_output_projections(self.model_runner.get_model(), dtype, self.device)
        for name, layer in self._headwise_layers():
            sizes = layer.num_kv_heads, layer.head_size_v
            projection = materialise(projections[name], *sizes, dtype, self.device)
            layer.impl.output_projection = self._prepared(projection)

    def _bind_rotations(self) -> None:
        """Gives each layer its rotary embedding."""
        model = self.model_runner.get_model()
        rotations = find_rotations(model, self.model_config, self.device)
        for name, layer in self._headwise_layers():
            layer.impl.rotation = rotations.get(name)

    def _bind_probes(self) -> None:
        """Gives each layer its part of the model's probe."""
        layers = dict(self._headwise_layers())
        file = self._eviction.of(ProbeFile).probe
        found = find_probes(self.vllm_config, file, layers.items(), self.device)
        for name, layer in layers.items():
            layer.impl.probe = found[name]

    def _headwise_layers(self) -> Iterator[tuple[str, Attention]]:
        """Attention layers of our backend that choose, by name: a drafter's follow these."""
        for name, layer in get_layers_from_vllm_config(self.vllm_config, Attention).items():
            chooses = layer.kv_sharing_target_layer_name is None and name not in self._of_drafter
            if isinstance(layer.impl, HeadwiseImpl) and chooses:
                yield name, layer


def _succeeds(bind: Callable[[], None]) -> bool:
    """Whether the model can give something, tried out: the start is refused anyway."""
    try:
        bind()
    except ConfigError:
        return False
    return True
