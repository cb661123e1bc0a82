"""Float64's word on rounds: what each head retained again and again, and every token after it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from tests import oracle
from tests.engine.conftest import Answer
from tests.engine.float64 import (
    BLOCK_SIZE,
    Expected,
    Layer,
    chosen,
    multiplied,
    pages,
    stage_1_scores,
    stage_2_scores,
    tail_begin,
    value_norms,
)
from tests.engine.float64_model import Model, Owner, attention, causal
from tests.engine.recorder import kept_by
from tests.method_cases import MethodCase
from vllm_kvselect.choice import Retention
from vllm_kvselect.engine.drop.drop import Drop
from vllm_kvselect.planning.cuts import Cut
from vllm_kvselect.registry import METHODS


class Round(NamedTuple):
    """What was retained in a round.

    Attributes:
        cut: The round.
        columns: Of every KV head of every layer that drops entries, by its place among these;
            counted from the head's first entry.
    """

    cut: Cut
    columns: dict[Owner, list[int]]


RoundsOf = dict[int, dict[int, Round]]
"""By length of the prompt and by position."""


@contextmanager
def recording_rounds() -> Iterator[RoundsOf]:
    """Records what rounds retain while open; prompts must have different lengths."""
    made: RoundsOf = defaultdict(dict)
    retention = Drop.retention

    def recorded(self: Drop, held: Any, candidates: Any) -> Retention:
        result = retention(self, held, candidates)
        if not self.columns.is_even:  # it is not the cut of a prompt
            for request, cut, kept in kept_by(self, result):
                made[request.plan.num_prompt_tokens][cut.position] = Round(cut, kept)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drop, "retention", recorded)
        yield made


Steps = list[tuple[int, list[int]]]
"""A head's entries after each cut, with the cut's position."""


class Answered:
    """An answer with rounds, and the float64 model that drops what the engine dropped.

    Args:
        model: The model.
        prompt: The prompt's tokens.
        answer: The answer.
        at_prompt: `(KV head, token)` that the cut at the prompt's end retained, by layer; empty
            without one. Layers are counted among those that drop entries.
        rounds: The rounds in order.
    """

    def __init__(
        self,
        model: Model,
        prompt: Sequence[int],
        answer: Answer,
        at_prompt: Mapping[int, set[Owner]],
        rounds: Sequence[Round],
    ) -> None:
        self._model, self._answer, self._rounds = model, answer, rounds
        self._tokens = [*prompt, *answer.token_ids[:-1]]
        self._num_prompt_tokens = len(prompt)
        self._full = [layer for layer, window in enumerate(model.windows) if window is None]
        self._steps = {owner: self._steps_of(owner, at_prompt) for owner in rounds[0].columns}
        self._seen: dict[int, tuple[torch.Tensor, ...]] = {}

    def check_tokens(self) -> None:
        """No token is likelier than those of the answer, whose probabilities are right."""
        exact = self._model.logits(self._tokens, self._attend)
        exact = exact[self._num_prompt_tokens - 1 :].log_softmax(-1)
        chosen = exact[range(len(self._answer.token_ids)), self._answer.token_ids]
        assert chosen.tolist() == pytest.approx(exact.amax(-1).tolist(), abs=1e-3)
        assert self._answer.logprobs == pytest.approx(chosen.tolist(), abs=1e-3)

    def check_first(self, num_first: int) -> None:
        """Every head holds the first tokens after each cut."""
        for steps in self._steps.values():
            for _, entries in steps:
                assert entries[:num_first] == [*range(num_first)]

    def check_rounds(self, case: MethodCase, num_ranks: int = 1) -> None:
        """Every round retained the published choice among what each head held.

        Each rank chooses among its own heads.
        """
        per_rank = self._model.num_kv_heads // num_ranks
        places = range(len(self._full))
        pools = [[*places]] if METHODS[case.method].pooled else [[place] for place in places]
        for number, (cut, columns) in enumerate(self._rounds):
            for layers, rank in product(pools, range(num_ranks)):
                owners = [
                    (layer, head)
                    for layer, head in columns
                    if layer in layers and head // per_rank == rank
                ]
                heads = [self._alone(owner, number) for owner in owners]
                wanted = expect(case, heads, owners, cut)
                for owner, expected in zip(owners, wanted, strict=True):
                    assert len(columns[owner]) == expected.count
                    expected.check(set(columns[owner]))

    def _steps_of(self, owner: Owner, at_prompt: Mapping[int, set[Owner]]) -> Steps:
        steps: Steps = []
        if at_prompt:
            tail = [*range(tail_begin(self._num_prompt_tokens), self._num_prompt_tokens)]
            layer, own = owner
            packed = sorted(token for head, token in at_prompt[layer] if head == own)
            steps.append((self._num_prompt_tokens, packed + tail))
        for cut, columns in self._rounds:
            entries = self._held(steps, len(steps), cut.position)
            tail = [token for token in entries if token >= cut.tail_start * BLOCK_SIZE]
            kept = [entries[column] for column in sorted(columns[owner])]
            assert not set(kept) & set(tail)
            steps.append((cut.position, kept + tail))
        return steps

    @staticmethod
    def _held(steps: Steps, num_made: int, position: int) -> list[int]:
        """Entries at a position, after some cuts."""
        last, entries = steps[num_made - 1] if num_made else (0, [])
        return [*entries, *range(last, position)]

    def _attend(self, layer: int, *tensors: torch.Tensor) -> torch.Tensor:
        self._seen[layer] = tensors
        num_tokens, num_heads = len(self._tokens), self._model.num_kv_heads
        is_seen = causal(num_tokens, self._model.windows[layer]).repeat(num_heads, 1, 1)
        for head in range(num_heads) if layer in self._full else ():
            for position, entries in self._steps[self._full.index(layer), head]:
                is_dropped = torch.arange(num_tokens) < position
                is_dropped[entries] = False
                is_seen[head, position:] &= ~is_dropped
        return attention(*tensors, is_seen, self._model.sinks(layer))

    def _entries(self, owner: Owner, number: int) -> list[int]:
        """What a head held before a round."""
        steps = self._steps[owner]
        num_made = number + len(steps) - len(self._rounds)
        return self._held(steps, num_made, self._rounds[number].cut.position)

    def _alone(self, owner: Owner, number: int) -> Layer:
        """A head with the entries that it held before a round."""
        place, head = owner
        layer = self._full[place]
        query, key, value = self._seen[layer]
        entries = self._entries(owner, number)
        group, size = query.shape[1] // key.shape[1], key.shape[2]
        queries, own = slice(head * group, (head + 1) * group), slice(head, head + 1)
        columns = slice(queries.start * size, queries.stop * size)
        sinks = self._model.sinks(layer)
        return Layer(
            query[entries, queries],
            key[entries, own],
            value[entries, own],
            self._model.projection(layer)[:, columns],
            sinks=None if sinks is None else sinks[queries],
            theta=self._model.theta(layer),
            num_turned=self._model.num_turned,
            probe=self._model.probes[layer][:, own],
            positions=torch.tensor(entries),
        )


def expect(
    case: MethodCase, heads: Sequence[Layer], owners: Sequence[Owner], cut: Cut
) -> list[Expected]:
    """What heads of different lengths should retain; their latest entries are the tail."""
    config, base = case.config(), oracle.base_of(case.method)
    num_tail = cut.position - cut.tail_start * BLOCK_SIZE
    most = max(len(head.query) for head in heads) - num_tail
    norms = [value_norms(h)[0, :-num_tail] for h in heads]
    rows, products = [], []
    for head, norm, (layer, index) in zip(heads, norms, owners, strict=True):
        if base == "random":
            drawn = oracle.random_scores(0, layer, index + 1, len(norm))[index]
            scores = weights = torch.tensor(drawn)
        else:
            scores = stage_1_scores(base, head, config, layer)[0, : len(norm)]
            weights = stage_2_scores(base, head, config, layer)[0, : len(norm)]
        scores, weights = scores.double(), weights.double()
        rows.append(scores)
        products.append(multiplied(base, weights, norm, config))
    for each in (*rows, *products):
        each[: config.num_first] = torch.inf
    ranking = products if base == "thetakv" else rows
    padded = [F.pad(row, (most - len(row), 0), value=-torch.inf) for row in ranking]
    least = config.model_copy(update={"floor": "minimum"})
    counts = pages(case.method, [torch.stack(padded)], least, cut.num_packed)
    return [
        chosen(case, count * BLOCK_SIZE, row, multiple)
        for row, multiple, count in zip(rows, products, counts, strict=True)
    ]
