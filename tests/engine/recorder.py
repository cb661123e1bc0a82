"""Records what goes into and comes out of every attention layer of a running engine."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from vllm_kvselect.engine.cpu.backend import HeadwiseCPUAttentionImpl
from vllm_kvselect.engine.drop.drop import Drop


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

    def retain(
        self, drop: Drop, layer: int, retained: torch.Tensor, num_heads: int, num_tokens: int
    ) -> None:
        if drop.columns.num_absent is not None:
            return  # a column is no token any more
        pairs = {divmod(index, num_tokens) for index in retained.tolist()}
        assert all(head < num_heads for head, _ in pairs)
        self.retained[drop.cut.position, layer] = pairs


@contextmanager
def recording(runner: Any) -> Iterator[Recorder]:
    """Records a model runner of this process while open.

    Prompts must have different lengths, which tell requests apart.
    """
    recorder = Recorder()
    forward = HeadwiseCPUAttentionImpl.forward
    retention, retention_of_all = Drop.retention, Drop.retention_of_all

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

    def retention_recorded(self: Drop, layer: Any, candidates: Any, value: Any) -> Any:
        result = retention(self, layer, candidates, value)
        shape = candidates.scores.shape
        recorder.retain(self, layer.layer_index, result.retained, *shape)
        return result

    def retention_of_all_recorded(self: Drop, layer: Any, candidates: Any) -> Any:
        result = retention_of_all(self, layer, candidates)
        num_layers, num_heads, num_tokens = candidates.scores.shape
        of_layer = result.retained // (num_heads * num_tokens)
        for index in range(num_layers):
            own = result.retained[of_layer == index] - index * num_heads * num_tokens
            recorder.retain(self, index, own, num_heads, num_tokens)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadwiseCPUAttentionImpl, "forward", forward_recorded)
        patch.setattr(Drop, "retention", retention_recorded)
        patch.setattr(Drop, "retention_of_all", retention_of_all_recorded)
        yield recorder
