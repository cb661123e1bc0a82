"""A decoder in float64 that drops entries the published way: one pass over a prompt and its answer.

Written from the architectures' definitions (Llama, Gemma 3 with its sliding layers, gpt-oss with
its sinks); shares no code with the package, vLLM or transformers. Selection is that of
`float64.py`, by rank: every rank chooses among its own heads, and with a pool among its own heads
of all layers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.engine.float64 import BLOCK_SIZE, Expected, Layer, expect, tail_begin
from tests.method_cases import MethodCase
from tests.probe_files import probe_of
from vllm_kvselect.registry import METHODS

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(layer, query, key, value)`, `[num_tokens, heads, head_size]` each -> output like the query."""

Owner = tuple[int, int]
"""A layer and one of its KV heads, counted through all ranks."""


class Model:
    """A checkpoint of one file: Llama's, Gemma 3's or, without rotary scaling, gpt-oss's.

    Args:
        folder: Where `config.json` and `model.safetensors` are.
    """

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        self._weights = {name.removeprefix("model."): w.double() for name, w in weights.items()}
        self.probes = load_file(probe_of(folder))["weights"]
        self.num_layers = self.config["num_hidden_layers"]
        self.num_kv_heads = self.config["num_key_value_heads"]
        self.is_gemma = self.config["model_type"].startswith("gemma3")
        self.is_gpt_oss = self.config["model_type"] == "gpt_oss"

    def projection(self, layer: int) -> torch.Tensor:
        """W_O of a layer, `[hidden_size, num_heads * head_size]`."""
        return self._weights[f"layers.{layer}.self_attn.o_proj.weight"]

    def sinks(self, layer: int) -> torch.Tensor | None:
        """Attention sinks of a layer, `[num_heads]`, if it has them."""
        return self._weights.get(f"layers.{layer}.self_attn.sinks")

    @cached_property
    def windows(self) -> list[int | None]:
        """Width of each layer's sliding window; None for full attention."""
        types = self.config.get("layer_types") or ["full_attention"] * self.num_layers
        width = self.config.get("sliding_window")
        return [width if kind == "sliding_attention" else None for kind in types]

    def logits(self, tokens: Sequence[int], attend: Attend) -> torch.Tensor:
        """`[num_tokens, vocab_size]`."""
        embedding = self._weights["embed_tokens.weight"]
        hidden = embedding[list(tokens)]
        if self.is_gemma:
            hidden = hidden * self.config["hidden_size"] ** 0.5
        for layer in range(self.num_layers):
            hidden = self._block(layer, hidden, attend)
        head = self._weights.get("lm_head.weight", embedding)
        return self._norm("norm", hidden) @ head.T

    def _block(self, layer: int, hidden: torch.Tensor, attend: Attend) -> torch.Tensor:
        name, mix = f"layers.{layer}", self._attention(layer, attend)
        if not self.is_gemma:
            hidden = hidden + mix(self._norm(f"{name}.input_layernorm", hidden))
            return hidden + self._mlp(name, self._norm(f"{name}.post_attention_layernorm", hidden))
        mixed = mix(self._norm(f"{name}.input_layernorm", hidden))
        hidden = hidden + self._norm(f"{name}.post_attention_layernorm", mixed)
        fed = self._mlp(name, self._norm(f"{name}.pre_feedforward_layernorm", hidden))
        return hidden + self._norm(f"{name}.post_feedforward_layernorm", fed)

    def _norm(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        weight = self._weights[f"{name}.weight"] + (1 if self.is_gemma else 0)
        mean_square = hidden.square().mean(-1, keepdim=True)
        return hidden / (mean_square + self.config["rms_norm_eps"]).sqrt() * weight

    def _linear(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self._weights[f"{name}.weight"].T + self._weights.get(f"{name}.bias", 0)

    def _mlp(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        if self.is_gpt_oss:
            return self._experts(f"{name}.mlp", hidden)
        gate, up, down = (
            self._weights[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        gated = hidden @ gate.T
        active = F.gelu(gated, approximate="tanh") if self.is_gemma else F.silu(gated)
        return (active * (hidden @ up.T)) @ down.T

    def _experts(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        """Each token goes to the experts whose logits are largest, weighed by these logits."""
        logits = self._linear(f"{name}.router", hidden)
        best = logits.topk(self.config["num_experts_per_tok"], dim=-1)
        shares = torch.zeros_like(logits).scatter(1, best.indices, best.values.softmax(-1))
        output, limit = torch.zeros_like(hidden), self.config.get("swiglu_limit", 7.0)
        for expert, share in enumerate(shares.unbind(1)):
            gate_up, gate_up_bias, down, down_bias = (
                self._weights[f"{name}.experts.{part}"][expert]
                for part in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
            )
            mixed = hidden @ gate_up + gate_up_bias
            gate, up = mixed[:, ::2].clamp(max=limit), mixed[:, 1::2].clamp(-limit, limit)
            active = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            output += share[:, None] * (active @ down + down_bias)
        return output

    def _attention(self, layer: int, attend: Attend) -> Callable[[torch.Tensor], torch.Tensor]:
        def mix(hidden: torch.Tensor) -> torch.Tensor:
            name, size = f"layers.{layer}.self_attn", self.config["head_dim"]
            query, key, value = (
                self._linear(f"{name}.{part}_proj", hidden).unflatten(-1, (-1, size))
                for part in "qkv"
            )
            if self.is_gemma:
                query, key = self._norm(f"{name}.q_norm", query), self._norm(f"{name}.k_norm", key)
            theta = self.theta(layer)
            assert theta is not None
            mixed = attend(layer, rotated(query, theta), rotated(key, theta), value)
            return self._linear(f"{name}.o_proj", mixed.flatten(-2))

        return mix

    def owner(self, layer: int) -> int:
        """The layer whose cache a layer reads: its own."""
        return layer

    def theta(self, layer: int) -> float | None:
        """Base of the rotary embedding; None without one."""
        parameters = self.config["rope_parameters"]
        if self.is_gemma:
            parameters = parameters[self.config["layer_types"][layer]]
        return float(parameters["rope_theta"])

    @property
    def num_turned(self) -> int | None:
        """Channels of a head that the embedding turns, the first ones; None for all."""
        return None


def rotated(vectors: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE: channel `i` turns with channel `i + head_size / 2`."""
    half = vectors.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(vectors), dtype=torch.float64)[:, None, None] * frequencies
    first, second = vectors[..., :half], vectors[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_seen: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of `[num_tokens, heads, head_size]` with a mask `[num_kv_heads, n, n]`."""
    value = value.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return torch.einsum("hqk,khd->qhd", attention_weights(query, key, is_seen, sinks), value)


def attention_weights(
    query: torch.Tensor, key: torch.Tensor, is_seen: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """What every query pays to every key, `[num_heads, n, n]`."""
    group = query.shape[1] // key.shape[1]
    key, is_seen = key.repeat_interleave(group, 1), is_seen.repeat_interleave(group, 0)
    logits = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
    logits = logits.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        of_rows = sinks[:, None, None].expand(-1, len(query), 1)
        logits = torch.cat((logits, of_rows), dim=-1)
    return logits.softmax(-1)[..., : len(query)]


def causal(num_tokens: int, window: int | None) -> torch.Tensor:
    """Who sees whom without eviction, `[num_tokens, num_tokens]`."""
    is_seen = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    return is_seen if window is None else is_seen.triu(1 - window)


class Answer:
    """What the method retains of a prompt, and how it goes on.

    Args:
        model: The model.
        prompt: The prompt's tokens.
        case: Method and parameters.
        num_ranks: Ranks of tensor parallelism.
    """

    def __init__(
        self, model: Model, prompt: Sequence[int], case: MethodCase, num_ranks: int = 1
    ) -> None:
        self._model, self._prompt = model, list(prompt)
        self.expected = self._expected(case, num_ranks)

    def check(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        retained: Mapping[Owner, set[int]],
    ) -> None:
        """Compares what an engine retained, and then its answer, with the model that reads that.

        Args:
            token_ids: The answer.
            logprobs: Its log-probabilities.
            retained: Tokens that each KV head of each full-attention layer retained.
        """
        assert retained.keys() == self.expected.keys()
        for owner, expected in self.expected.items():
            assert len(retained[owner]) == expected.count
            expected.check(retained[owner])
        exact = self._logits(token_ids, retained).log_softmax(-1)
        chosen = exact[range(len(token_ids)), list(token_ids)]
        # Tokens of random weights may tie up to rounding; whichever was taken, none is likelier.
        assert chosen.tolist() == pytest.approx(exact.amax(-1).tolist(), abs=1e-3)
        assert list(logprobs) == pytest.approx(chosen.tolist(), abs=1e-3)

    def check_roughly(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        retained: Mapping[Owner, set[int]],
    ) -> None:
        """The same of an engine in bfloat16, whose roundings add up: what is wrong is far off.

        Args:
            token_ids: As of `check`.
            logprobs: As of `check`.
            retained: As of `check`.
        """
        assert retained.keys() == self.expected.keys()
        found = []
        # Where heads share pages, a rounding may give one to another head.
        counts = [expected.count for expected in self.expected.values()]
        assert sum(map(len, retained.values())) == sum(counts)
        for owner, expected in self.expected.items():
            count = len(retained[owner])
            assert abs(count - expected.count) <= BLOCK_SIZE
            best = expected.keys.topk(count).indices.tolist()
            found.append(len(retained[owner].intersection(best)) / count)
        assert sum(found) / len(found) > 0.9
        whole = {owner: {*range(tail_begin(len(self._prompt)))} for owner in retained}
        apart, of_all = (
            (self._logprobs(token_ids, read) - torch.tensor(logprobs)).abs().mean()
            for read in (retained, whole)
        )
        assert apart < of_all / 5

    def _logprobs(self, answer: Sequence[int], retained: Mapping[Owner, set[int]]) -> torch.Tensor:
        """Log-probabilities of the answer, `[len(answer)]`."""
        exact = self._logits(answer, retained).log_softmax(-1)
        return exact[range(len(answer)), list(answer)]

    def _logits(self, answer: Sequence[int], retained: Mapping[Owner, set[int]]) -> torch.Tensor:
        """Logits of every token of the answer, `[len(answer), vocab_size]`."""
        tokens, prompt_len = [*self._prompt, *answer[:-1]], len(self._prompt)

        def attend(layer: int, query: Any, key: Any, value: Any) -> torch.Tensor:
            is_seen = causal(len(tokens), self._model.windows[layer]).repeat(key.shape[1], 1, 1)
            owner = self._model.owner(layer)
            for head in range(key.shape[1]):
                if (owner, head) in retained:
                    is_dropped = torch.ones(tail_begin(prompt_len), dtype=torch.bool)
                    is_dropped[list(retained[owner, head])] = False
                    is_seen[head, prompt_len:, : len(is_dropped)] &= ~is_dropped
            return attention(query, key, value, is_seen, self._model.sinks(layer))

        return self._model.logits(tokens, attend)[prompt_len - 1 :]

    def _expected(self, case: MethodCase, num_ranks: int) -> Mapping[Owner, Expected]:
        """What every KV head of every full-attention layer should retain."""
        seen: dict[int, tuple[torch.Tensor, ...]] = {}

        def attend(layer: int, *tensors: torch.Tensor) -> torch.Tensor:
            seen[layer] = tensors
            is_seen = causal(len(self._prompt), self._model.windows[layer])
            by_head = is_seen.repeat(self._model.num_kv_heads, 1, 1)
            return attention(*tensors, by_head, self._model.sinks(layer))

        self._model.logits(self._prompt, attend)
        owners = [layer for layer in seen if self._model.owner(layer) == layer]
        full = [layer for layer in owners if self._model.windows[layer] is None]
        expected = {}
        for rank in range(num_ranks):
            layers = []
            for layer in full:
                parts = [tensor.chunk(num_ranks, dim=1)[rank] for tensor in seen[layer]]
                columns = self._model.projection(layer).chunk(num_ranks, dim=1)[rank]
                sinks = self._model.sinks(layer)
                own = None if sinks is None else sinks.chunk(num_ranks)[rank]
                probe = self._model.probes[layer].chunk(num_ranks, dim=1)[rank]
                layers.append(
                    Layer(
                        *parts,
                        columns,
                        sinks=own,
                        theta=self._model.theta(layer),
                        num_turned=self._model.num_turned,
                        probe=probe,
                    )
                )
            if METHODS[case.method].pooled:
                heads = expect(case, layers)
            else:
                heads = [
                    head
                    for index, layer in enumerate(layers)
                    for head in expect(case, [layer], index)
                ]
            num_heads = self._model.num_kv_heads // num_ranks
            for index, head in enumerate(heads):
                owner = full[index // num_heads], rank * num_heads + index % num_heads
                expected[owner] = head
        return expected
