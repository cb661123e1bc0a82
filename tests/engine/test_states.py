"""States on a real engine: whoever begins alike goes on from what others compressed."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.engine.all_rounds import CASES
from tests.engine.conftest import Answer, Engine, EngineFactory, preempting_all
from tests.engine.float64_model import Model
from tests.engine.float64_rounds import Answered, recording_rounds
from tests.engine.random_models import random_prompts
from vllm_kvselect.engine.scheduler.block_manager import HeadwiseManager

pytestmark = pytest.mark.xdist_group("states")

INTERVAL = 128
EVICTION = {
    "method": "layer-keydiff",
    "budget": 192,
    "prompt_interval": INTERVAL - 3,  # whole blocks of 32, rounded up
    "allow_override": ["method", "budget", "prompt_interval", "context", "decode_budget"],
    "check_integrity": True,
}
METHODS = ("layer-keydiff", "layer-probe", "adakv-perturb", "keydiff", "thetakv")
NUM_TURNS, NUM_GENERATED = 5, 24


def alone(
    engine: Engine, prompts: Sequence[list[int]], settings: dict[str, Any], num_tokens: int
) -> list[Answer]:
    """Answers of an engine that finds nothing."""
    answers = []
    for prompt in prompts:
        assert engine.scheduler.reset_prefix_cache()
        answers += engine.generate([prompt], num_tokens, [settings])
    return answers


def state_before(num_tokens: int) -> int:
    """Tokens of the last state that a prompt may go on from."""
    return (num_tokens - 1) // INTERVAL * INTERVAL


@pytest.fixture(scope="module")
def texts(text_tokens: list[int]) -> list[list[int]]:
    """Prompts that have nothing in common."""
    return [text_tokens[start : start + 1000] for start in range(0, 8000, 1000)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk", [300, 37])
def test_each_turn_goes_on_from_the_last_state(
    share_engine: EngineFactory, texts: list[list[int]], method: str, chunk: int
) -> None:
    settings = {"kv_eviction": method}
    with share_engine(EVICTION, 300, max_num_batched_tokens=chunk) as engine:
        turns, answers = [texts[0][:450]], []
        hits = engine.record_hits()
        for turn in range(NUM_TURNS):
            answers += engine.generate([turns[-1]], NUM_GENERATED, [settings])
            more = texts[1][90 * turn : 90 * turn + 70 + turn]
            turns.append(turns[-1] + answers[-1].token_ids + more)
        assert hits[0] == 0
        for before, now, num_found in zip(turns, turns[1:], hits[1:], strict=False):
            # All up to a block and a window before the next cut, which was the prompt's end.
            assert state_before(len(before)) <= num_found <= len(before)
            assert len(now) - num_found < INTERVAL + NUM_GENERATED + 120
        assert answers == alone(engine, turns[:NUM_TURNS], settings, NUM_GENERATED)


def test_forks_and_other_budgets_each_find_their_own(
    share_engine: EngineFactory, texts: list[list[int]]
) -> None:
    beginning = texts[2][:600]
    prompts = [beginning + texts[index][: 200 + 40 * index] for index in range(4)]
    with share_engine(EVICTION, 300, max_num_batched_tokens=300) as engine:
        hits, answers, found = engine.record_hits(), {}, {}
        for budget in (192, 320):
            own = {"kv_eviction_budget": budget}
            answers[budget] = [engine.generate([each], 24, [own])[0] for each in prompts]
            found[budget], hits[:] = [*hits], []
        none = engine.generate(prompts[:1], 24, [{"kv_eviction": "none"}])
        [num_plain] = hits
        for budget, own in found.items():
            # The second budget finds what the first one has computed before its first cut.
            assert own[0] < INTERVAL * 4
            assert min(own[1:]) >= state_before(600)
            settings = {"kv_eviction_budget": budget}
            assert answers[budget] == alone(engine, prompts, settings, 24)
        # Of the second one's beginning, whose first cut came later.
        assert num_plain == INTERVAL * 4
        assert none == alone(engine, prompts[:1], {"kv_eviction": "none"}, 24)


def test_preempted_requests_go_on_from_their_last_state(
    share_engine: EngineFactory, texts: list[list[int]]
) -> None:
    prompts = [text[: 500 + 60 * index] for index, text in enumerate(texts[:4])]
    with share_engine(EVICTION, 300, max_num_batched_tokens=300) as engine:
        hits = engine.record_hits()
        with pytest.MonkeyPatch.context() as patch:
            # What a reset preempts is computed anew, as all names are gone: here they stay.
            patch.setattr(
                type(engine.scheduler.kv_cache_manager), "reset_prefix_cache", lambda _: True
            )
            with preempting_all(num_answering=4) as preempted:
                answers = engine.generate(prompts, 40)
        assert len(preempted) == 4
        assert hits[:4] == [0] * 4
        again = sorted(hits[4:])[-4:]
        assert again == [pytest.approx(len(each), abs=INTERVAL + 64) for each in prompts]
        assert answers == alone(engine, prompts, {}, 40)


def test_of_those_that_come_at_once_one_computes_what_they_share(
    share_engine: EngineFactory, texts: list[list[int]]
) -> None:
    beginning = texts[3][:900]
    prompts = [beginning + texts[index][: 30 + index] for index in range(6)]
    with share_engine(EVICTION, 400, max_num_batched_tokens=300) as engine:
        hits = engine.record_hits()
        answers = engine.generate(prompts, 24)
        # Each looks again whenever the one that computes has left a further state.
        assert min(sorted(hits)[-5:]) >= state_before(900)
        assert engine.worker.kv_eviction_stats()["num_evicted"] == 6
        assert answers == alone(engine, prompts, {}, 24)


@pytest.mark.parametrize("method", ["layer-keydiff", "layer-probe"])
def test_answers_are_cut_behind_contexts_and_states(
    share_engine: EngineFactory, texts: list[list[int]], method: str
) -> None:
    settings = {"kv_eviction": method, "kv_eviction_decode_budget": 96}
    settings |= {"kv_eviction_context": 600}
    prompts = [texts[4][:600] + texts[index][: 40 + index] for index in range(2)]
    with share_engine(EVICTION, 300, max_num_batched_tokens=300) as engine:
        for own in (settings, {**settings, "kv_eviction_prompt_interval": 0}):
            hits = engine.record_hits()
            answers = [engine.generate([each], 200, [own])[0] for each in prompts]
            assert hits[1:] == [576]
            assert answers == alone(engine, prompts, own, 200)


def test_idle_sessions_are_not_pushed_out_by_what_newer_states_stand_for(
    start_engine: EngineFactory, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sessions that grow in turn, in a pool that holds their last states and little more."""

    def lost(engine: Engine) -> int:
        sessions, hits = [text[:600] for text in texts[:3]], engine.record_hits()
        for turn in range(4):
            for index, session in enumerate(sessions):
                [answer] = engine.generate([session], 8)
                more = texts[index + 4][150 * turn : 150 * turn + 130]
                sessions[index] = session + answer.token_ids + more
        lengths = [600 + 138 * turn for turn in range(4)]
        return sum(
            num_found < state_before(before)
            for before, num_found in zip(
                [each for each in lengths[:-1] for _ in range(3)], hits[3:], strict=True
            )
        )

    eviction = {**EVICTION, "allow_override": []}
    sizes = {"max_model_len": 1100, "max_num_batched_tokens": 300}
    with start_engine(eviction, 62, **sizes) as engine:
        assert lost(engine) == 0
        engine.scheduler.reset_prefix_cache()
        monkeypatch.setattr(HeadwiseManager, "_offer_superseded", lambda *_: None)
        assert lost(engine) > 0


def test_what_is_cut_behind_a_found_state_is_as_the_float64_model_says(
    start: EngineFactory, random_model: Path
) -> None:
    """Every method's prompt grows twice: each cut is made by the turn that comes to it."""
    prompts = random_prompts([300 + 5 * index for index in range(len(CASES))])
    more = random_prompts([2 * (90 + 2 * index) for index in range(len(CASES))])
    turns = [prompts]
    for number in (1, 2):
        turns.append(
            [
                prompt + own[: number * len(own) // 2]
                for prompt, own in zip(prompts, more, strict=True)
            ]
        )
    extra_args: Any = [{"kv_eviction": case.method} for case in CASES]
    eviction = {"budget": 96, "prompt_interval": 64, "allow_override": ["method"]}
    eviction |= {"check_integrity": True}
    with start(eviction, 400, max_num_batched_tokens=256) as engine, recording_rounds() as rounds:
        hits = engine.record_hits()
        for each in turns:
            answers = engine.generate(each, 20, extra_args)
        assert min(hits[-len(CASES) :]) >= 320
    for index, (case, answer) in enumerate(zip(CASES, answers, strict=True)):
        made = {}
        for each in turns:
            length = len(each[index])
            own = rounds[length]
            made = {at: cut for at, cut in made.items() if at % 64 == 0} | own
        assert len(turns[-1][index]) in made
        assert any(one % 64 == 0 and other % 64 == 0 for one, other in pairwise(sorted(made)))
        in_order = [each for _, each in sorted(made.items())]
        answered = Answered(Model(random_model), turns[-1][index], answer, {}, in_order)
        answered.check_tokens()
        answered.check_rounds(case)
