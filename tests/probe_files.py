"""Probes with random weights for the models of the tests: they pass for calibrated ones."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.strategies import random_probe
from vllm_kvselect.layer_kinds import STATES
from vllm_kvselect.probes.file import ModelFacts, Probe, ProbeFacts, QualityFacts
from vllm_kvselect.probes.fingerprint import fingerprint


@cache
def probe_of(model: Path) -> Path:
    """Writes a probe of a model beside its folder; features of real layers are a few units long."""
    config = json.loads((model / "config.json").read_text())
    kinds = config.get("layers_block_type") or config.get("layer_types") or ()
    keeps_states = not STATES.isdisjoint(kinds)
    layers = [layer for layer, kind in enumerate(kinds) if "full" in kind or kind == "attention"]
    sizes: dict[str, Any] = {
        "layers": tuple(layers) if keeps_states else None,
        "num_layers": len(layers) if keeps_states else config["num_hidden_layers"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_size": config["head_dim"],
    }
    facts = ModelFacts(name=model.name, fingerprint=fingerprint(str(model)), **sizes)
    weights = [
        0.2 * random_probe(facts.num_kv_heads, facts.head_size, seed=index)
        for index in range(facts.num_layers)
    ]
    quality = QualityFacts(
        num_tokens=1, num_tokens_left_out=1, budgets=(1.0,), fitted=(0.0,), tuned=(0.0,)
    )
    path = model.parent / f"{model.name}-probe.safetensors"
    probe_facts = ProbeFacts(written_by="tests", model=facts, settings={}, quality=quality)
    Probe(torch.stack(weights), probe_facts).save(path)
    return path
