"""Model runner V2 in real engines, see `runner_v2.py`: its answers are those of the CPU backend."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Answer, EngineFactory, engines_of
from tests.engine.random_hybrids import granite_h, saved
from tests.engine.random_models import random_llama, random_mimo, random_prompts
from tests.engine.test_cuda_end_to_end import SETTINGS as SIZES
from tests.engine.test_drafters import (
    NUM_LAYERS,
    PROMPTS,
    SERVER,
    SETTINGS,
    answered_alone,
    mixed_requests,
)
from tests.load.mixture import Request
from tests.marks import starts_engine
from tests.own_process import said_by

pytest.importorskip("triton")
pytestmark = [pytest.mark.xdist_group("runner v2"), pytest.mark.timeout(1000)]
"""One process does for several runs, and takes minutes on a busy machine."""

NUM_GENERATED = 16
MAKE_ROUNDS = (2, 7, 8)
"""Requests that make rounds, which asynchronous scheduling excludes beside drafters."""
MAKE_NONE = (0, 1, 4, 5, 6, 10, 11)
CHOSEN = {
    "draft_model": MAKE_NONE,
    "eagle": MAKE_NONE,
    "eagle3": MAKE_NONE,
    "mtp": MAKE_NONE,
    "rounds": MAKE_ROUNDS,
}
SHORT, LONG = ("draft_model", "eagle", "hybrid"), ("eagle3", "mtp", "rounds")
HYBRID: dict[str, Any] = {
    "method": "adakv",
    "budget": 96,
    "allow_override": ["method"],
    "probe": None,
    "check_integrity": True,
}
METHODS_OF_HYBRID = [{"kv_eviction": name} for name in ("adakv", "knorm", "layer-keydiff", "none")]
PROMPTS_OF_HYBRID = random_prompts([310, 290, 400, 60])


def mixed_requests_without_rounds() -> list[Request]:
    """What asynchronous scheduling takes beside a drafter."""
    return mixed_requests(300, 100, make_rounds=False)


def settings_of_hybrid(folder: Path) -> dict[str, Any]:
    """An engine of a model that keeps states beside attention."""
    settings = {**SIZES, "model": saved(granite_h, folder), "max_model_len": 512}
    return settings | {"kv_cache_memory_bytes": 2**24, "enable_prefix_caching": False}


@cache
@starts_engine
def found(runs: tuple[str, ...]) -> dict[str, Any]:
    """What a process that has that runner finds."""
    said: dict[str, Any] = said_by("tests.engine.runner_v2", *runs, timeout=3600)
    return said


def answers_of(run: str) -> list[Answer]:
    said = found(SHORT if run in SHORT else LONG)[run]
    assert isinstance(said, dict), said
    assert said["num_cut"] > 2
    assert run == "hybrid" or said["num_drafts"] > 15
    return [Answer(**answer) for answer in said["answers"]]


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=[pytest.mark.load] * (run in LONG)) for run in CHOSEN]
)
def test_drafters_change_no_token(run: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    (random_mimo if run == "mtp" else random_llama)(model, NUM_LAYERS)
    prompts, own = ([part[index] for index in CHOSEN[run]] for part in (PROMPTS, SETTINGS))
    with engines_of(model) as start, start(SERVER, 130) as engine:
        expected = engine.generate(prompts, NUM_GENERATED, own)
    assert answers_of(run) == expected


@pytest.mark.load  # tests/engine/test_drafters.py has such requests with model runner V1
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_mixed_requests_are_answered_as_alone(method: str, tmp_path: Path) -> None:
    run, requests = f"mixed {method}", mixed_requests_without_rounds()
    said = found((run,))[run]
    assert isinstance(said, dict), said
    assert said["num_drafts"] > len(requests)
    assert said["num_cut"] > len(requests) / 4
    for event in ("preemptions", "resets", "left", "cached tokens"):
        assert said["seen"][event] > 0, said["seen"]
    with engines_of(random_llama(tmp_path / "model", NUM_LAYERS)) as start:
        expected = answered_alone(start, requests)
    for request, tokens in zip(requests, said["tokens"], strict=True):
        (wanted,) = expected[request.key].token_ids.values()
        assert tokens == wanted[: len(tokens) if request.leaves_after is not None else None]


def test_hybrids_are_served(start_engine: EngineFactory, tmp_path: Path) -> None:
    with start_engine(HYBRID, 0, **settings_of_hybrid(tmp_path)) as engine:
        expected = engine.generate(PROMPTS_OF_HYBRID, NUM_GENERATED, METHODS_OF_HYBRID)
    assert answers_of("hybrid") == expected
