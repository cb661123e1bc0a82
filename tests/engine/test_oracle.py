"""The right entries and the right arithmetic: float64 oracles on the real model's tensors.

The oracles share no code with the package: they see recorded queries, keys and values, the
checkpoint's own W_O and, for the arithmetic, the set of retained entries.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.conftest import SHALLOW_LAYERS, EngineFactory
from tests.engine.recorder import Recorder, recording
from tests.method_cases import METHOD_CASES, MethodCase

pytestmark = pytest.mark.engine
BLOCK_SIZE, WINDOW, BUDGET = 32, 32, 160
NUM_KV_HEADS, GROUP, HEAD_SIZE = 3, 3, 64
PROMPT_LENS = (500, 351, 300)
UNIT = 2.0**-24
"""Unit roundoff of float32."""


@pytest.fixture(params=METHOD_CASES, ids=lambda case: case.name)
def recorded(
    request: pytest.FixtureRequest, start_engine: EngineFactory, make_prompts: Any
) -> tuple[MethodCase, Recorder]:
    """One run of three requests at once, their prompts in chunks of at most 256 tokens."""
    case: MethodCase = request.param
    eviction = {"method": case.method, "budget": BUDGET, **case.values}
    settings = {"max_num_batched_tokens": 256, "max_num_seqs": 4, "enable_prefix_caching": False}
    with start_engine(eviction, 100, **settings) as engine, recording(engine) as recorder:
        engine.generate(make_prompts(PROMPT_LENS), 20)
    return case, recorder


def test_oracles(recorded: tuple[MethodCase, Recorder], shallow_model: Path) -> None:
    case, recorder = recorded
    weights = load_file(shallow_model / "model.safetensors")
    assert len(recorder.tokens) == len(PROMPT_LENS) * SHALLOW_LAYERS
    for (prompt_len, layer), tensors in recorder.tokens.items():
        retained = recorder.retained[prompt_len, layer]
        check_attention(prompt_len, tensors, retained)
        projection = weights[f"model.layers.{layer}.self_attn.o_proj.weight"].double()
        check_selection(case, prompt_len, tensors, retained, projection)


def tail_begin(prompt_len: int) -> int:
    return (prompt_len - WINDOW) // BLOCK_SIZE * BLOCK_SIZE


def check_attention(
    prompt_len: int, tensors: dict[str, torch.Tensor], retained: set[tuple[int, int]]
) -> None:
    """Every token's attention output, prompt and decode, from the set of entries it may see."""
    query, key, value, output = (tensors[name] for name in ("query", "key", "value", "output"))
    for position in [prompt_len // 2, prompt_len - 1, *range(prompt_len, len(query))]:
        for kv_head in range(NUM_KV_HEADS):
            seen = range(position + 1)
            if position >= prompt_len:
                packed = [token for head, token in retained if head == kv_head]
                seen = [*packed, *range(tail_begin(prompt_len), position + 1)]
            k, v = key[list(seen), kv_head], value[list(seen), kv_head]
            for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
                logits = k @ query[position, head] * HEAD_SIZE**-0.5
                expected = torch.softmax(logits, 0) @ v
                error = (output[position, head] - expected).abs().max()
                assert error <= attention_bound(query[position, head], k, v)


def attention_bound(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float:
    """Largest float32 error of `softmax(q k) v`, to first order, for any order of the sums.

    A logit is a sum of `d` products: off by at most `(d + 2) u |q|_1-wise`, bounded by Cauchy and
    Schwarz. A weight is then off by twice that, relatively, from its exp and from the sum of all,
    plus the roundings of the sum over n entries and of exp (taken as 4 u). The output is a convex
    combination, so these carry over times the largest value, twice for weights and products.
    """
    size, num_entries = key.shape[1], key.shape[0]
    logit = (size + 2) * UNIT * query.norm() * key.norm(dim=1).max() * size**-0.5
    return float((2 * logit + 2 * (num_entries + 4) * UNIT) * 2 * value.abs().max())


def check_selection(
    case: MethodCase,
    prompt_len: int,
    tensors: dict[str, torch.Tensor],
    retained: set[tuple[int, int]],
    projection: torch.Tensor,
) -> None:
    """Recomputes the published selection; only entries on the cut itself may differ."""
    config = case.config(budget=BUDGET)
    num_tokens = tail_begin(prompt_len)
    num_packed = -(-(BUDGET - (prompt_len - num_tokens)) // BLOCK_SIZE)
    scores = oracle_scores(case, tensors, prompt_len)[:, :num_tokens]
    counts = torch.tensor([sum(head == h for head, _ in retained) for h in range(NUM_KV_HEADS)])
    assert counts.tolist() == oracle_counts(case, scores, num_packed)
    for head in range(NUM_KV_HEADS):
        keys = scores[head]
        if case.method.endswith("-perturb"):
            first = int(config.alpha * int(counts[head]))
            norms = torch.zeros(num_tokens, dtype=torch.float64)
            for member in range(head * GROUP, (head + 1) * GROUP):
                columns = projection[:, member * HEAD_SIZE : (member + 1) * HEAD_SIZE]
                norms += (tensors["value"][:num_tokens, head] @ columns.T).abs().sum(1) / GROUP
            keys = (scores[head] + config.eps) * norms
            keys[torch.sort(scores[head], descending=True, stable=True).indices[:first]] = torch.inf
        order = torch.sort(keys, descending=True, stable=True).indices
        expected = set(order[: counts[head]].tolist())
        actual = {token for h, token in retained if h == head}
        cut = keys[order[counts[head] - 1]] if counts[head] else torch.tensor(torch.inf)
        for token in expected ^ actual:
            # float32 scores are off by some 1e-6 relatively: no more than that decides a place.
            on_stage_1_cut = case.method.endswith("-perturb") and is_tie(scores[head], first, token)
            assert on_stage_1_cut or torch.isclose(keys[token], cut, rtol=1e-4, atol=0)


def is_tie(scores: torch.Tensor, rank: int, token: int) -> bool:
    """Whether a token's score is that of the given rank, up to rounding."""
    cut = scores.sort(descending=True).values[max(rank - 1, 0) : rank + 1]
    return bool(torch.isclose(scores[token], cut, rtol=1e-4, atol=0).any())


def oracle_scores(
    case: MethodCase, tensors: dict[str, torch.Tensor], prompt_len: int
) -> torch.Tensor:
    """Scores `[num_kv_heads, prompt_len - window]` head by head, query by query."""
    num_scored = prompt_len - WINDOW
    config = case.config()
    if case.method == "streaming-llm":
        order = torch.arange(num_scored, dtype=torch.float64)
        order[: config.num_sinks] = num_scored
        return order.repeat(NUM_KV_HEADS, 1)
    scores = torch.zeros(NUM_KV_HEADS, num_scored, dtype=torch.float64)
    for head in range(NUM_KV_HEADS * GROUP):
        for position in range(num_scored, prompt_len):
            keys = tensors["key"][: position + 1, head // GROUP]
            logits = keys @ tensors["query"][position, head] * HEAD_SIZE**-0.5
            scores[head // GROUP] += torch.softmax(logits, 0)[:num_scored] / (GROUP * WINDOW)
    half = config.kernel_size // 2
    return torch.stack(
        [scores[:, max(0, token - half) : token + half + 1].amax(1) for token in range(num_scored)],
        dim=1,
    )


def oracle_counts(case: MethodCase, scores: torch.Tensor, num_packed: int) -> list[int]:
    """Entries per head, whole pages."""
    even = num_packed * BLOCK_SIZE
    if not case.method.startswith("adakv"):
        return [even] * NUM_KV_HEADS
    best = scores.flatten().sort(descending=True).indices[: even * NUM_KV_HEADS]
    counts = [int((best // scores.shape[1] == head).sum()) for head in range(NUM_KV_HEADS)]
    safeguard = case.config().safeguard
    pages = [(safeguard * even + (1 - safeguard) * count) / BLOCK_SIZE for count in counts]
    whole = [int(page + 1e-6) for page in pages]
    by_remainder = sorted(range(NUM_KV_HEADS), key=lambda head: whole[head] - pages[head])
    for head in by_remainder[: num_packed * NUM_KV_HEADS - sum(whole)]:
        whole[head] += 1
    return [page * BLOCK_SIZE for page in whole]
