"""The calibrated probe of an analysed model."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vllm_kvselect.config import ConfigError, EvictionConfig
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.models import model_folder
from vllm_kvselect.probes.fingerprint import fingerprint
from vllm_kvselect.probes.places import find_probe
from vllm_kvselect.registry import AUTO, KNOWN_METHODS, best_method
from vllm_kvselect.scorers import ProbeFile


def named(method: str, model: str, eviction: Mapping[str, Any]) -> str:
    """The method that is meant, `auto` being what a server of one rank would choose.

    Changes may follow: `auto:alpha=0.25`. `eviction` is set for all methods.
    """
    name, *changes = method.split(":")
    if name != AUTO:
        return method
    again = any(eviction.get(key) for key in ("decode_budget", "prompt_interval"))
    has_probe = eviction.get("probe") is not None or _has_probe(model)
    best = best_method(
        lambda each: (has_probe or "probe" not in each.needs) and (each.in_rounds or not again)
    )
    return ":".join((best, *changes))


def _has_probe(model: str) -> bool:
    name = model_folder(model)
    try:
        find_probe(name, fingerprint(name), None)
    except ConfigError:
        return False
    return True


def probe_for(model: str, evictions: Iterable[EvictionConfig]) -> torch.Tensor | None:
    """Reads the probe of a model, by its folder or hub name, if some method needs it.

    Returns:
        `[num_layers, num_features, num_kv_heads]`, or None where no method asks.

    Raises:
        EvaluationError: If the methods name several probes.
        ConfigError: If there is no probe of the model, or the file is another model's.
    """
    files = {
        each.of(ProbeFile).probe
        for each in evictions
        if each.enabled and "probe" in KNOWN_METHODS[each.method].needs
    }
    if not files:
        return None
    if len(files) > 1:
        raise EvaluationError("methods with several probes are measured one run after the other")
    (file,) = files
    name = model_folder(model)
    return find_probe(name, fingerprint(name), file)[0].weights
