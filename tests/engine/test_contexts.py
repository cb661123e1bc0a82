"""Contexts on a real engine: compressed once, read by many, and right for everyone."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from tests.engine.conftest import Answer, Engine, EngineFactory, preempting_all
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.scheduler.cut_scheduler import CutScheduler
from vllm_kvselect.engine.states.names import StateNames
from vllm_kvselect.planning.cuts import cuts

pytestmark = pytest.mark.xdist_group("contexts")
"""They share an engine."""

CONTEXT, QUESTIONS = 700, 8
BORDER = CONTEXT // 32
EVICTION = {
    "method": "layer-keydiff",
    "budget": 0.25,
    "allow_override": ["method", "budget", "context"],
    "check_integrity": True,
}
METHODS = ("layer-keydiff", "adakv-perturb", "keydiff", "layer-defensivekv")
(CUT,) = cuts(CONTEXT, 32, EvictionConfig(method="adakv-perturb", budget=0.25, context=CONTEXT))


@pytest.fixture(scope="module")
def prompts(text_tokens: list[int]) -> list[list[int]]:
    """Questions of different length over one context."""
    context = text_tokens[:CONTEXT]
    # Each begins with a token of its own, so that nothing but the context is the same.
    return [
        [*context, 1000 + i, *text_tokens[2000 + 90 * i : 2040 + 97 * i]] for i in range(QUESTIONS)
    ]


def marked(number: int = 1, **values: Any) -> list[dict[str, Any]]:
    return [{"kv_eviction_context": CONTEXT, **values}] * number


def alone(
    engine: Engine,
    prompts: Sequence[list[int]],
    settings: Sequence[dict[str, Any]],
    num_tokens: int = 24,
) -> list[Answer]:
    """Answers of an engine that finds nothing."""
    hits, answers = engine.record_hits(), []
    for prompt, own in zip(prompts, settings, strict=True):
        assert engine.scheduler.reset_prefix_cache()
        answers += engine.generate([prompt], num_tokens, [own])
    assert hits == [0] * len(prompts)
    return answers


@pytest.mark.parametrize("method", METHODS)
def test_a_question_gets_the_answer_that_it_gets_alone(
    share_engine: EngineFactory, prompts: list[list[int]], method: str
) -> None:
    settings = marked(QUESTIONS, kv_eviction=method)
    with share_engine(EVICTION, 200) as engine:
        assert isinstance(engine.scheduler, CutScheduler)
        hits = engine.record_hits()
        first = engine.generate(prompts[:1], 24, settings[:1])
        others = engine.generate(prompts[1:], 24, settings[1:])
        assert hits == [0] + [32 * BORDER] * (QUESTIONS - 1)
        assert engine.worker.kv_eviction_stats()["num_evicted"] == 1
        assert engine.blocks_in_use() == 0
        assert first + others == alone(engine, prompts, settings)


def test_who_comes_at_once_waits_for_the_one_that_compresses(
    start_engine: EngineFactory, prompts: list[list[int]]
) -> None:
    own = [-(-(len(prompt) + 24) // 32) - BORDER for prompt in prompts]
    with start_engine(EVICTION, 200, max_num_batched_tokens=256) as engine:
        hits, held = engine.record_hits(), engine.record_blocks()
        answers = engine.generate(prompts, 24, marked(QUESTIONS))
        assert engine.worker.kv_eviction_stats()["num_evicted"] == 1
        assert hits == [0] + [32 * BORDER] * (QUESTIONS - 1)
        # One compressed context, and each one's own; while the first one computes, no other does.
        assert max(held) <= max(BORDER, BORDER - CUT.first_packed + sum(own))
        assert answers == alone(engine, prompts, marked(QUESTIONS))


def test_the_next_turn_finds_question_and_answer(
    share_engine: EngineFactory, prompts: list[list[int]], text_tokens: list[int]
) -> None:
    turns, answers = [prompts[1]], []
    with share_engine(EVICTION, 200) as engine:
        hits = engine.record_hits()
        for turn in range(4):
            answers += engine.generate([turns[-1]], 40, marked())
            again = text_tokens[5000 + 50 * turn : 5030 + 50 * turn]
            turns.append(turns[-1] + answers[-1].token_ids + again)
        # All full blocks of the turn before, but for the last token's, which nobody computed.
        assert hits == [0, *((len(turn) + 39) // 32 * 32 for turn in turns[:3])]
        assert answers == alone(engine, turns[:4], marked(4), 40)


@pytest.mark.parametrize(
    "change",
    [
        {"kv_eviction": "keydiff"},
        {"kv_eviction_budget": 0.5},
        {"kv_eviction_context": CONTEXT - 32},
        {"kv_eviction": "none"},
    ],
)
def test_other_settings_find_nothing_that_was_compressed(
    share_engine: EngineFactory, prompts: list[list[int]], change: dict[str, Any]
) -> None:
    settings = [marked()[0] | change]
    with share_engine(EVICTION, 200) as engine:
        engine.generate(prompts[:1], 4, marked())
        hits = engine.record_hits()
        answers = engine.generate(prompts[1:2], 24, settings)
        [num_found] = hits
        assert answers == alone(engine, prompts[1:2], settings)
    # Blocks that were given back are stock's, and serve whoever needs them uncompressed.
    names = {"budget": "kv_eviction_budget", "context": "kv_eviction_context"}
    values = {"budget": 0.25, "context": CONTEXT}
    values |= {name: change[key] for name, key in names.items() if key in change}
    own = cuts(len(prompts[1]), 32, EvictionConfig(method="adakv-perturb", **values))
    drops = change.get("kv_eviction") != "none"
    assert num_found == (own.most_found(32, 32) if drops else 32 * BORDER)


def test_another_salt_finds_nothing(share_engine: EngineFactory, prompts: list[list[int]]) -> None:
    with share_engine(EVICTION, 200) as engine:
        hits = engine.record_hits()
        for salt in ("a", "b", "a"):
            params = engine.sampling(4, marked()[0])
            prompt = {"prompt_token_ids": prompts[0], "cache_salt": salt}
            engine.llm.generate([prompt], params, use_tqdm=False)
    assert hits == [0, 0, (len(prompts[0]) - 1) // 32 * 32]


def test_preempted_readers_find_their_context_again(
    share_engine: EngineFactory, prompts: list[list[int]]
) -> None:
    with share_engine(EVICTION, 200) as engine:
        with preempting_all(num_answering=4) as generated:
            answers = engine.generate(prompts[:4], 24, marked(4))
        assert len(generated) == 4
        assert answers == alone(engine, prompts[:4], marked(4))


def test_a_context_for_one_token_is_compressed_and_found(
    share_engine: EngineFactory, prompts: list[list[int]]
) -> None:
    with share_engine(EVICTION, 200) as engine:
        hits = engine.record_hits()
        engine.generate(prompts[:1], 1, marked())
        answers = engine.generate(prompts[1:2], 24, marked())
        assert hits == [0, 32 * BORDER]
        assert answers == alone(engine, prompts[1:2], marked())


def test_what_was_compressed_outlives_what_it_was_compressed_from(
    start_engine: EngineFactory, text_tokens: list[int]
) -> None:
    """Four contexts of 22 blocks in a pool of 60: none gives way to the whole blocks of another."""
    contexts = [text_tokens[start : start + CONTEXT + 20] for start in range(0, 4000, 1000)]
    with start_engine(EVICTION, 60, max_model_len=1024) as engine:
        for context in contexts:
            engine.generate([context], 4, marked())
        hits = engine.record_hits()
        for context in contexts:
            engine.generate([context], 4, marked())
    assert min(hits) >= 32 * BORDER


def test_half_a_context_is_never_found(
    start_engine: EngineFactory,
    prompts: list[list[int]],
    text_tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others take the memory of some of its blocks; the rest is of no use."""
    insert, given = StateNames._insert, set[BlockHash]()

    def noted(names: StateNames, name: BlockHash, block: KVCacheBlock, index: int) -> None:
        given.update([name] if index < BORDER else [])
        insert(names, name, block, index)

    monkeypatch.setattr(StateNames, "_insert", noted)
    with start_engine(EVICTION, 40, max_model_len=1200) as engine:
        engine.generate(prompts[:1], 4, marked())
        assert _num_named(engine, given) == CUT.num_packed
        engine.generate([text_tokens[9000:10150]], 4, [{"kv_eviction": "none"}])
        assert 0 < _num_named(engine, given) < CUT.num_packed
        hits = engine.record_hits()
        answers = engine.generate(prompts[1:3], 24, marked(2))
        assert hits[0] < CUT.position
        assert hits[-1] == 32 * BORDER
        assert _num_named(engine, given) == CUT.num_packed
        assert answers == alone(engine, prompts[1:3], marked(2))


def _num_named(engine: Engine, given: Iterable[BlockHash]) -> int:
    """Blocks that the pool holds by some names."""
    (manager,) = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    return sum(manager.names._cached(name) is not None for name in given)
