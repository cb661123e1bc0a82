"""Probes in files: weights as safetensors, and what they are of as its metadata."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_kvselect.config import ConfigError
from vllm_kvselect.scoring.probe import num_features

VERSION: Final = 3
"""Raised whenever a file of before would be read wrongly: other features, facts or order."""

_FORMAT, _FACTS, _WEIGHTS = "vllm-kvselect-probe", "facts", "weights"


class ModelFacts(BaseModel):
    """The model that a probe is of; with weights of another fingerprint it is of no use.

    The name is for people. `layers` are those that attend; None for all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    layers: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the weights, `[num_layers, num_features, num_kv_heads]`."""
        return self.num_layers, num_features(self.head_size), self.num_kv_heads


class QualityFacts(BaseModel):
    """How far a model is from its full cache while it repeats texts from what a probe retains.

    Attributes:
        num_tokens: Tokens that the probe was made from.
        num_tokens_left_out: Tokens of other texts, by which it is judged.
        budgets: Shares of the entries that are retained.
        fitted: Nats a token at each of them, before the tuning.
        tuned: Likewise of the probe as it is; the same where it was not tuned.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_tokens: int
    num_tokens_left_out: int
    budgets: tuple[float, ...]
    fitted: tuple[float, ...]
    tuned: tuple[float, ...]


class ProbeFacts(BaseModel):
    """All that is known of a probe, and the settings that it depends on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[3] = VERSION
    written_by: str
    model: ModelFacts
    settings: dict[str, Any]
    quality: QualityFacts


class Probe(NamedTuple):
    """A probe and what is known of it.

    Attributes:
        weights: `[num_layers, num_features, num_kv_heads]` float32; see `scoring/probe.py`.
        facts: What they are of.
    """

    weights: torch.Tensor
    facts: ProbeFacts

    def of_layer(self, layer: int) -> torch.Tensor:
        """The weights of one of the model's layers, `[num_features, num_kv_heads]`.

        Raises:
            ConfigError: If it has none of this layer.
        """
        layers = self.facts.model.layers or range(len(self.weights))
        if layer not in layers:
            raise ConfigError(f"it has no weights of layer {layer}")
        return self.weights[layers.index(layer)]

    def save(self, path: Path) -> None:
        """Writes the file, complete or not at all.

        Raises:
            ConfigError: If it cannot be written.
        """
        metadata = {"format": _FORMAT, _FACTS: self.facts.model_dump_json()}
        write({_WEIGHTS: self.weights}, path, metadata)

    @classmethod
    def load(cls, path: Path, model: str = "MODEL") -> Self:
        """Reads a file; errors put the model's folder or hub name into the command to type.

        Raises:
            ConfigError: If there is none, or it is no probe, or one of another version, or
                incomplete.
        """
        again = f"make it with `vllm-kvselect calibrate {model}`"
        if not path.is_file():
            raise ConfigError(f"there is no file {path}; {again}")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                weights = file.get_tensor(_WEIGHTS) if metadata.get("format") == _FORMAT else None
        except SafetensorError as error:
            raise ConfigError(f"{path} is not a safetensors file of ours: {error}") from None
        if weights is None:
            raise ConfigError(f"{path} holds no probe: its metadata does not say {_FORMAT}")
        try:
            facts = ProbeFacts.model_validate_json(metadata.get(_FACTS, ""))
        except ValidationError as error:
            problem = error.errors()[0]
            raise ConfigError(
                f"{path} is a probe of another version than {VERSION} "
                f"({'.'.join(map(str, problem['loc']))}: {problem['msg']}); {again} anew"
            ) from None
        if tuple(weights.shape) != facts.model.shape or weights.dtype != torch.float32:
            raise ConfigError(
                f"{path} holds {weights.dtype} weights of shape {tuple(weights.shape)}, where "
                f"its model needs float32 of {facts.model.shape}; {again} anew"
            )
        return cls(weights, facts)


def write(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Writes a file, complete or not at all, in place of what is there.

    Raises:
        ConfigError: If it cannot be written.
    """
    make_place(path)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        save_file({name: part.contiguous() for name, part in tensors.items()}, unfinished, metadata)
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {path}: {error}") from None


def make_place(path: Path) -> None:
    """Makes the folder for a probe's file; asked before hours are spent on what goes into it.

    Raises:
        ConfigError: If there can be no such file.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name the file to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from None
