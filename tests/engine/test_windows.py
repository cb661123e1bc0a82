"""A tiny Gemma 3, whose sliding layers stay vLLM's own, and a tiny gpt-oss, which has sinks, too.

Each of its query heads has a logit of its own in every softmax.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.all_methods import (
    EVICTION,
    METHODS,
    Served,
    check_method,
    check_nothing_dropped_is_stock,
    serve_all_methods,
)
from tests.engine.conftest import BLOCK_SIZE, Answer, Engine, EngineFactory
from tests.engine.float64 import WINDOW, num_packed, tail_begin
from tests.engine.random_models import random_gemma3, random_gpt_oss, random_prompts
from vllm_kvselect.engine.scheduler.block_manager import WindowManager

pytestmark = pytest.mark.xdist_group("windows")
NOTHING_DROPPED = {"kv_eviction": "none"}


windows = pytest.mark.parametrize(
    "random_model", [pytest.param(random_gemma3, id="windows")], indirect=True
)
both = pytest.mark.parametrize(
    "random_model", [random_gemma3, random_gpt_oss], ids=["windows", "sinks"], indirect=True
)
FULL_ATTENTION = {"gemma3_text": [2, 5], "gpt_oss": [1, 3]}


@pytest.fixture(scope="module")
def served(start: EngineFactory) -> Served:
    return serve_all_methods(start)


@both
@pytest.mark.parametrize("index", range(len(METHODS)), ids=METHODS)
def test_full_attention_drops_as_the_reference_and_sinks_count(
    index: int, served: Served, random_model: Path
) -> None:
    config = json.loads((random_model / "config.json").read_text())
    check_method(index, served, random_model, FULL_ATTENTION[config["model_type"]])


@both
def test_nothing_dropped_is_stock(start: EngineFactory) -> None:
    check_nothing_dropped_is_stock(start)


def blocks_by_group(engine: Engine, prompt: list[int], **settings: Any) -> list[list[int]]:
    """Blocks that a request holds of every group after each step, freed ones aside."""
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers

    def count(_: Any) -> list[int]:
        tables = [[b for t in m.req_to_blocks.values() for b in t] for m in managers]
        return [sum(not block.is_null for block in table) for table in tables]

    held = engine.record_steps(count)
    engine.outputs([prompt], 80, [settings])
    return [*held]


@windows
def test_blocks_of_full_attention_are_freed_and_those_of_windows_are_as_in_stock(
    start: EngineFactory,
) -> None:
    (prompt,) = random_prompts([500])
    with start(EVICTION, 40, enable_prefix_caching=False) as engine:
        dropping = blocks_by_group(engine, prompt, kv_eviction="adakv")
        stock = blocks_by_group(engine, prompt, **NOTHING_DROPPED)
        managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
        windows = [isinstance(manager, WindowManager) for manager in managers]
        assert engine.blocks_in_use() == 0
    assert sorted(windows) == [False, True, True]
    full = windows.index(False)
    num_freed = tail_begin(500) // BLOCK_SIZE - num_packed(500)
    for step, (ours, theirs) in enumerate(zip(dropping, stock, strict=True)):
        expected = list(theirs)
        if 0 < step < 80:
            expected[full] -= num_freed
        assert ours == expected
    assert num_freed == 10


@windows
def test_the_same_request_again_hits_before_its_cut(start: EngineFactory) -> None:
    prompts = random_prompts([500, 420])
    with start(EVICTION, 60) as engine:
        hits = engine.record_hits()
        first = engine.generate_alone(prompts, 40)
        # One that drops nothing finds what was computed before the cut.
        engine.generate(prompts, 1, [NOTHING_DROPPED] * 2)
        assert engine.generate(prompts, 40) == first
        assert engine.generate_alone(prompts, 40) == first
    most = [min(len(p) // BLOCK_SIZE - 1, (len(p) - WINDOW) // BLOCK_SIZE) for p in prompts]
    stock = [(len(prompt) - 1) // BLOCK_SIZE for prompt in prompts]
    assert [hit // BLOCK_SIZE for hit in hits] == [0, 0, *stock, *most, *most]


@windows
def test_tokens_generated_after_dropping_are_found_by_nobody(start: EngineFactory) -> None:
    """Sliding layers' entries of an answer depend on what the full-attention layers dropped."""
    prompt, *rest = random_prompts([500, 50, 60])
    with start(EVICTION, 60, prefix_cache_retention_interval=BLOCK_SIZE) as engine:
        (answer,) = engine.generate([prompt], 100)
        turns: list[Any] = [[*prompt, *answer.token_ids, *more] for more in rest]
        # The first turn hashes what full attention computes of the answer, the second one hits it.
        engine.generate([turns[0]], 1, [NOTHING_DROPPED])
        (again,) = engine.generate([turns[1]], 20, [NOTHING_DROPPED])
    with start(None, 60, enable_prefix_caching=False) as engine:
        expected: list[Answer] = engine.generate([turns[1]], 20)
    assert [again] == expected
