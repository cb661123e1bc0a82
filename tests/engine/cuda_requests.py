"""Requests of attention layers with the CUDA backend, and what the oracle says they retain."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests import oracle
from vllm_kvselect.engine.drop.request import Request as LiveRequest
from vllm_kvselect.planning.cuts import Cut
from vllm_kvselect.registry import METHODS

NUM_LAYERS, NUM_KV_HEADS, GROUP, HEAD_SIZE, HIDDEN_SIZE = 2, 2, 2, 16, 24
BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS, MAX_MODEL_LEN = 16, 60, 4, 256
SCALE = HEAD_SIZE**-0.5
SCALES = {"q": 0.25, "k": 0.5, "v": 2.0}
"""Of an fp8 cache; powers of two, so that dequantising rounds nothing."""
Owner = tuple[int, int]
"""A layer and a KV head."""
OWNERS = [(layer, head) for layer in range(NUM_LAYERS) for head in range(NUM_KV_HEADS)]


@dataclass(eq=False)
class Request:
    """A request's tensors, `[num_layers, num_tokens, num_heads, head_size]`, and where it is.

    Attributes:
        query: As the layers get them.
        key: As the layers get them.
        value: As the layers get them.
        read: What attention reads of each, float64.
        prompt: The prompt, with its cuts.
        blocks: Block ids; 0 where entries were dropped.
        given_back: Blocks that a cut which is due gives back.
        num_computed: Tokens that are in the cache.
        retained: What every head of every layer retains before the tail, by the cut's position.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    read: dict[str, torch.Tensor]
    prompt: LiveRequest
    blocks: list[int] = field(default_factory=list)
    given_back: list[int] = field(default_factory=list)
    num_computed: int = 0
    retained: dict[int, dict[Owner, list[int]]] = field(default_factory=dict)

    def seen(self, layer: int, head: int, position: int) -> list[int]:
        """Tokens that a query may attend to."""
        cut = self.prompt.plan.cuts.last_made(position)
        if cut is None:
            return [*range(position + 1)]
        tail = range(cut.tail_start * BLOCK_SIZE, position + 1)
        return [*self.retained[cut.position][layer, head], *tail]

    def come_to(self, num_tokens: int, layers: Sequence[Any]) -> None:
        """Asks the oracle what is retained at the cuts up to a length.

        Args:
            num_tokens: The length.
            layers: vLLM's attention layers, with their parameters.
        """
        num_prompt_tokens = self.prompt.plan.num_prompt_tokens
        for cut in self.prompt.plan.cuts:
            if cut.position > num_tokens or cut.position in self.retained:
                continue
            is_first_of_prompt = not self.retained and cut.position <= num_prompt_tokens
            choose = self._at_prompt if is_first_of_prompt else self._again
            retained: dict[Owner, list[int]] = {owner: [] for owner in OWNERS}
            for owner, token in choose(cut, layers):
                retained[owner].append(token)
            self.retained[cut.position] = retained

    @property
    def _pools(self) -> list[list[int]]:
        """Layers that share pages."""
        is_pooled = METHODS[self.prompt.plan.settings.method].pooled
        return [[*range(NUM_LAYERS)]] if is_pooled else [[layer] for layer in range(NUM_LAYERS)]

    def _at_prompt(self, cut: Cut, layers: Sequence[Any]) -> list[tuple[Owner, int]]:
        eviction, chosen = self.prompt.plan.settings, []
        first_query = -eviction.window
        if self.prompt.plan.num_in_prompt > 1:
            # Where heads will differ at later cuts, all are made by the rule for such heads.
            eviction = eviction.model_copy(update={"floor": "minimum"})
        for pool in self._pools:
            inputs = []
            for layer in pool:
                query, key, value = (self.read[name][layer, : cut.position] for name in "qkv")
                impl = layers[layer].impl
                inputs.append(
                    oracle.LayerInputs(
                        query[first_query:].tolist(),
                        key.transpose(0, 1).tolist(),
                        value[: cut.tail_start * BLOCK_SIZE].transpose(0, 1).tolist(),
                        impl.output_projection.weight.double().tolist(),
                        None if impl.sinks is None else impl.sinks.tolist(),
                        probe=impl.probe.tolist(),
                    )
                )
            sizes = (SCALE, cut.num_packed, BLOCK_SIZE, eviction)
            for index, token in oracle.retain(inputs, *sizes, first_layer=pool[0]).entries:
                chosen.append((OWNERS[pool[0] * NUM_KV_HEADS + index], token))
        return chosen

    def _again(self, cut: Cut, layers: Sequence[Any]) -> list[tuple[Owner, int]]:
        """Heads hold different numbers of entries."""
        eviction, begin, chosen = self.prompt.plan.settings, cut.tail_start * BLOCK_SIZE, []
        held = {owner: self.seen(*owner, cut.position - 1) for owner in OWNERS}
        counts = {owner: sum(token < begin for token in held[owner]) for owner in OWNERS}
        for pool in self._pools:
            heads = [[(layer, head) for head in range(NUM_KV_HEADS)] for layer in pool]
            found = oracle.retain_uneven(
                [[self._alone(owner, held[owner], cut, layers) for owner in row] for row in heads],
                max(counts.values()),
                SCALE,
                cut.num_packed,
                BLOCK_SIZE,
                eviction,
                pool[0],
            )
            for index, column in found.entries:
                owner = OWNERS[pool[0] * NUM_KV_HEADS + index]
                # Columns of all heads end together.
                column -= max(counts.values()) - counts[owner]
                chosen.append((owner, held[owner][column]))
        return chosen

    def _alone(
        self, owner: Owner, entries: list[int], cut: Cut, layers: Sequence[Any]
    ) -> oracle.LayerInputs:
        """A head with the entries that it holds before a cut."""
        layer, head = owner
        query, key, value = (self.read[name][layer] for name in "qkv")
        group, impl = slice(head * GROUP, (head + 1) * GROUP), layers[layer].impl
        competing = [token for token in entries if token < cut.tail_start * BLOCK_SIZE]
        return oracle.LayerInputs(
            query[cut.position - self.prompt.plan.settings.window : cut.position, group].tolist(),
            [key[entries, head].tolist()],
            [value[competing, head].tolist()],
            impl.output_projection.weight[head : head + 1].double().tolist(),
            None if impl.sinks is None else impl.sinks[group].tolist(),
            numbers=[self._numbers(owner, entries, cut.position, impl)],
        )

    def _numbers(self, owner: Owner, entries: list[int], position: int, impl: Any) -> list[float]:
        """What the probe says of each entry."""
        layer, head = owner
        key, value = ([self.read[name][layer, :position, head].tolist()] for name in "kv")
        probe = impl.probe[:, head : head + 1].tolist()
        (scores,) = oracle.probe_scores(key, value, probe, (), 0)
        return [scores[token] for token in entries]
