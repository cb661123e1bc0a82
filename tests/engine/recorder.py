"""Records what goes into and comes out of every attention layer of a running engine."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch

from vllm_kvselect.choice import Retention
from vllm_kvselect.engine.cpu.backend import HeadwiseCPUAttentionImpl
from vllm_kvselect.engine.drop.drop import Drop
from vllm_kvselect.engine.drop.request import Request
from vllm_kvselect.planning.cuts import Cut


class Recorder:
    """Queries, keys, values and outputs of every token, and what was retained.

    Attributes:
        tokens: `{(prompt length, layer): {name: [num_tokens, num_heads, head_size]}}`, float64.
        retained: `{(prompt length, layer): [(kv_head, token)]}` of the packed entries.
    """

    def __init__(self) -> None:
        self._parts: Any = defaultdict(lambda: defaultdict(list))
        self.retained: dict[tuple[int, int], set[tuple[int, int]]] = {}

    @property
    def tokens(self) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
        return {
            key: {name: torch.cat(parts).double() for name, parts in by_name.items()}
            for key, by_name in self._parts.items()
        }

    def add(self, runner: Any, layer: int, tensors: dict[str, torch.Tensor]) -> None:
        starts = runner.query_start_loc.np
        for row in range(runner.input_batch.num_reqs):
            key = int(runner.input_batch.num_prompt_tokens[row]), layer
            for name, tensor in tensors.items():
                self._parts[key][name].append(tensor[starts[row] : starts[row + 1]].clone())

    def retain(self, drop: Drop, retention: Retention) -> None:
        if not drop.columns.is_even:
            return  # a column is no token any more
        for _, cut, kept in kept_by(drop, retention):
            for layer in {layer for layer, _ in kept}:
                self.retained[cut.position, layer] = {
                    (head, token)
                    for (own, head), tokens in kept.items()
                    for token in tokens
                    if own == layer
                }


def kept_by(
    drop: Drop, retention: Retention
) -> Iterator[tuple[Request, Cut, dict[tuple[int, int], list[int]]]]:
    """What each request retains, by layer and KV head, counted from the head's first entry."""
    columns, num_layers = drop.columns, drop._state.num_choosing
    absent, num_heads = columns.num_absent.tolist(), drop._state.num_kv_heads
    owners = list(product(range(num_layers), range(num_heads)))
    found: list[dict[tuple[int, int], list[int]]] = [
        {owner: [] for owner in owners} for _ in drop.requests
    ]
    for index in retention.retained.tolist():
        row, column = divmod(index, columns.num_competing)
        request, own = divmod(row, len(owners))
        layer, head = owners[own]
        found[request][layer, head].append(column - absent[request][layer][head])
    yield from zip(drop.requests, drop.cuts, found, strict=True)


@contextmanager
def recording(runner: Any) -> Iterator[Recorder]:
    """Records a model runner of this process while open.

    Prompts must have different lengths, which tell requests apart.
    """
    recorder = Recorder()
    forward = HeadwiseCPUAttentionImpl.forward
    retention = Drop.retention

    def forward_recorded(
        self: Any,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **scales: Any,
    ) -> Any:
        result = forward(self, layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        tensors = {"query": query, "key": key, "value": value, "output": output}
        if self.sliding_window == -1 and self.kv_sharing_target_layer_name is None:
            recorder.add(runner, self.layer_index, tensors)
        return result

    def retention_recorded(self: Drop, held: Any, candidates: Any) -> Retention:
        result = retention(self, held, candidates)
        recorder.retain(self, result)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadwiseCPUAttentionImpl, "forward", forward_recorded)
        patch.setattr(Drop, "retention", retention_recorded)
        yield recorder
