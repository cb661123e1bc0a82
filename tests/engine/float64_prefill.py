"""Float64's word on sparse prefills: what every segment read, and every token after it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.engine.conftest import Answer
from tests.engine.float64_model import Model, attention, causal
from tests.oracle import prefill as oracle
from vllm_kvselect.engine.sparse.worker_segments import SparseRow
from vllm_kvselect.prefilling.blocks import ChosenBlocks

SIZE, BLOCK, BUDGET = 64, 32, 96
Chosen = dict[int, dict[int, dict[int, list[set[int]]]]]
"""Blocks of each KV head, by end of a prompt's sparse segments, layer and segment's start."""


@contextmanager
def recording_blocks() -> Iterator[Chosen]:
    """Records which blocks segments read while open, and that they never change their mind."""
    made: Chosen = defaultdict(lambda: defaultdict(dict))
    choose = SparseRow._choose

    def choose_recorded(self: Any, *arguments: Any) -> ChosenBlocks:
        chosen = choose(self, *arguments)
        layer = next(a for a in arguments if hasattr(a, "layer_index")).layer_index
        found = made[self.prefill.segments.end][layer]
        rows = zip(chosen.indices.tolist(), chosen.counts.tolist(), strict=True)
        for start, (indices, counts) in zip(self.starts, rows, strict=True):
            blocks = [set(i[:n]) for i, n in zip(indices, counts, strict=True)]
            assert found.setdefault(start, blocks) == blocks
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseRow, "_choose", choose_recorded)
        yield made


class Exact:
    """A prompt and its answer in float64, where segments read what the engine's did.

    Args:
        model: The model.
        prompt: The prompt.
        chosen: Blocks by layer, counted among those with full attention, and segment.
    """

    def __init__(
        self, model: Model, prompt: Sequence[int], chosen: dict[int, dict[int, list[set[int]]]]
    ) -> None:
        self._model, self._prompt, self._chosen = model, list(prompt), chosen
        self._full = [layer for layer, window in enumerate(model.windows) if window is None]
        self._seen: dict[int, tuple[torch.Tensor, ...]] = {}

    def check(self, answer: Answer) -> None:
        """No token is likelier than those of the answer, whose probabilities are right."""
        tokens = [*self._prompt, *answer.token_ids[:-1]]
        exact = self._model.logits(tokens, self._attend)[len(self._prompt) - 1 :].log_softmax(-1)
        taken = exact[range(len(answer.token_ids)), answer.token_ids]
        assert taken.tolist() == pytest.approx(exact.amax(-1).tolist(), abs=1e-3)
        assert answer.logprobs == pytest.approx(taken.tolist(), abs=1e-3)

    def check_blocks(self, count: int = BUDGET // BLOCK) -> None:
        """The blocks are those that the published rule chooses, up to rounding of ties."""
        before: dict[tuple[int, int], list[float]] = {}
        assert sorted(self._chosen) == [*range(1, len(self._full))]
        for place, segments in sorted(self._chosen.items()):
            query, key, _ = self._seen[self._full[place]]
            group, scale = query.shape[1] // key.shape[1], query.shape[2] ** -0.5
            for head in range(key.shape[1]):
                own = query[:, head * group : (head + 1) * group].transpose(0, 1).tolist()
                shares = oracle.critical(own, key[:, head].tolist(), SIZE, BLOCK, scale)
                for start, blocks in segments.items():
                    fused = shares[start // SIZE]
                    if place > 1:
                        previous = before[head, start]
                        fused = [0.25 * p + 0.75 * c for p, c in zip(previous, fused, strict=True)]
                    before[head, start] = fused
                    found = sorted(fused[b] for b in blocks[head])
                    expected = oracle.most_critical(fused, count)
                    assert found == pytest.approx(sorted(fused[b] for b in expected), abs=1e-4)

    def _attend(self, layer: int, *tensors: torch.Tensor) -> torch.Tensor:
        self._seen[layer] = tuple(tensor[: len(self._prompt)] for tensor in tensors)
        num_tokens, num_heads = len(tensors[0]), self._model.num_kv_heads
        is_seen = causal(num_tokens, self._model.windows[layer]).repeat(num_heads, 1, 1)
        if layer in self._full:
            for start, blocks in self._chosen.get(self._full.index(layer), {}).items():
                for head, own in enumerate(blocks):
                    is_read = torch.zeros(start // BLOCK, dtype=torch.bool)
                    is_read[list(own)] = True
                    is_seen[head, start : start + SIZE, :start] &= is_read.repeat_interleave(BLOCK)
        return attention(*tensors, is_seen, self._model.sinks(layer))
