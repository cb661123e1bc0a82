"""Models with other layers beside attention, by transformers; attention itself is the tests' own.

What transformers makes of states, vLLM's code has no part in. It computes them in float32.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from tests.engine.float64_model import Attend, Model
from tests.probe_files import probe_of
from vllm_kvselect.probes.file import Probe

_NAME = "of_the_tests"
_attending: list[Attend] = []


def _forward(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """A layer's attention, as transformers calls it: `[1, heads, num_tokens, head_size]`."""
    (attend,) = _attending
    query = query * (kwargs["scaling"] * query.shape[-1] ** 0.5)  # the tests scale by the rest
    by_token = (part[0].transpose(0, 1).double() for part in (query, key, value))
    return attend(module.layer_idx, *by_token)[None].to(query.dtype), None


AttentionInterface.register(_NAME, _forward)


class HybridModel(Model):
    """A checkpoint of any family that transformers knows; see `Model`.

    Args:
        folder: Where it is.
    """

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=_NAME
        ).eval()
        self.num_layers = self._model.config.num_hidden_layers
        self.num_kv_heads = self.config["num_key_value_heads"]
        probe = Probe.load(probe_of(folder))
        self.probes = torch.zeros(self.num_layers, *probe.weights.shape[1:])
        self.probes[list(probe.facts.model.layers or range(self.num_layers))] = probe.weights

    def projection(self, layer: int) -> torch.Tensor:
        """W_O of a layer, `[hidden_size, num_heads * head_size]`."""
        (attention,) = (
            module
            for module in self._model.modules()
            if getattr(module, "layer_idx", None) == layer and hasattr(module, "k_proj")
        )
        output = getattr(attention, "o_proj", None) or attention.out_proj
        return output.weight.double()

    def owner(self, layer: int) -> int:
        """The layer whose cache a layer reads: of its kind, the last one that has its own."""
        num_owners = self.num_layers - (self.config.get("num_kv_shared_layers") or 0)
        if layer < num_owners:
            return layer
        types = self.config["layer_types"]
        return max(index for index in range(num_owners) if types[index] == types[layer])

    def sinks(self, layer: int) -> None:
        """No model here has any."""

    def theta(self, layer: int) -> float | None:
        """Base of the rotary embedding; None without one."""
        if self.config.get("position_embedding_type") == "nope":
            return None
        theta = (self.config.get("rope_parameters") or {}).get("rope_theta")
        return None if theta is None else float(theta)

    @property
    def num_turned(self) -> int | None:
        """Channels of a head that the embedding turns, the first ones; None for all."""
        share = (self.config.get("rope_parameters") or {}).get("partial_rotary_factor")
        return None if share is None else int(self.config["head_dim"] * share)

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], attend: Attend) -> torch.Tensor:
        """`[num_tokens, vocab_size]`."""
        with _attended_by(attend):
            output = self._model(torch.tensor([list(tokens)]), use_cache=False)
        return output.logits[0].double()


@contextmanager
def _attended_by(attend: Attend) -> Iterator[None]:
    _attending.append(attend)
    try:
        yield
    finally:
        _attending.pop()
