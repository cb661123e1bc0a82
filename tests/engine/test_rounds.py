"""Rounds in real engines: a float64 model's word on every entry and every token."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.all_methods import engines_of
from tests.engine.conftest import BLOCK_SIZE, Answer, Engine, EngineFactory, preempting_all
from tests.engine.float64_model import Model
from tests.engine.float64_rounds import Answered, RoundsOf, recording_rounds
from tests.engine.random_models import (
    random_gemma3,
    random_gpt_oss,
    random_llama,
    random_prompts,
)
from tests.engine.recorder import Recorder, recording
from tests.method_cases import MethodCase
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.retention import cuts

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("rounds")]
DECODE_BUDGET, INTERVAL, NUM_GENERATED = 96, 64, 180
ROUNDS = {"decode_budget": DECODE_BUDGET, "decode_interval": INTERVAL, "check_integrity": True}
CASES = [
    MethodCase(name)
    for name in (
        "streaming-llm",
        "random",
        "snapkv",
        "snapkv-perturb",
        "adakv",
        "adakv-perturb",
        "r-kv",
        "h2o",
        "h2o-perturb",
        "thetakv",
        "layer-thetakv",
        "keydiff",
        "ada-keydiff-perturb",
        "layer-keydiff-perturb",
    )
]
# Some are cut at their end, some only in rounds; rounds begin at different lengths.
PROMPTS = random_prompts([40 + 31 * index for index in range(len(CASES))])
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


class Served(NamedTuple):
    """Answers of all methods at once, preempted on the way."""

    answers: list[Answer]
    recorder: Recorder
    rounds: RoundsOf


def serve(start: EngineFactory, num_generated: int = NUM_GENERATED, **values: Any) -> Served:
    extra_args: Any = [{"kv_eviction": case.method} for case in CASES]
    # Gemma's and gpt-oss's sliding layers have a manager of their own, which nothing checks.
    settings = {"budget": 160, "allow_override": ["method"], **ROUNDS, "check_integrity": False}
    settings |= values
    with (
        start(settings, 90, max_num_batched_tokens=256) as engine,
        recording(engine.worker.model_runner) as recorder,
        recording_rounds() as rounds,
        preempting_all(6, num_tokens=100) as preempted,
    ):
        answers = engine.generate(PROMPTS, num_generated, extra_args)
    assert preempted
    return Served(answers, recorder, rounds)


def check(index: int, served: Served, folder: Path, keep_prompt: bool = False) -> None:
    prompt = PROMPTS[index]
    at_prompt = {
        layer: retained
        for (length, layer), retained in served.recorder.retained.items()
        if length == len(prompt)
    }
    rounds = [made for _, made in sorted(served.rounds[len(prompt)].items())]
    assert rounds
    answered = Answered(Model(folder), prompt, served.answers[index], at_prompt, rounds)
    answered.check_tokens()
    answered.check_rounds(CASES[index], keep_prompt)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("rounds") / "llama")


@pytest.fixture(scope="module")
def start(llama: Path) -> Iterator[EngineFactory]:
    with engines_of(llama) as factory:
        yield factory


@pytest.fixture(scope="module")
def served(start: EngineFactory) -> Served:
    return serve(start)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.method for case in CASES])
def test_every_round_and_every_token_is_as_the_float64_model_says(
    index: int, served: Served, llama: Path
) -> None:
    check(index, served, llama)


def test_the_prompt_is_left_alone_where_it_shall_be(start: EngineFactory, llama: Path) -> None:
    # The first round comes once there is more than the prompt's blocks and the budget.
    served = serve(start, NUM_GENERATED + 80, keep_prompt=True)
    for index in range(len(CASES)):
        check(index, served, llama, keep_prompt=True)


@pytest.mark.parametrize("make", [random_gemma3, random_gpt_oss], ids=["windows", "sinks"])
def test_other_architectures_make_the_same_rounds(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = make(tmp_path / "model")
    with engines_of(folder) as start:
        served = serve(start)
    for index in range(len(CASES)):
        check(index, served, folder)


# vLLM's client leaves its ZeroMQ context to the garbage collector.
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
def test_rounds_count_accepted_tokens_only(
    start: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In processes of their own: once numba has compiled, vLLM 0.32 cannot start there again.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    settings = {"method": "adakv-perturb", "budget": 1.0, **ROUNDS}
    answers, rounds = [], []
    for options in ({}, {"speculative_config": NGRAM}):
        with start(settings, 90, disable_log_stats=False, **options) as engine:
            answers.append(engine.generate(PROMPTS[:3], 200))
            found = {metric.name: metric for metric in engine.llm.get_metrics()}
            rounds.append(found["vllm:kv_eviction_rounds"].value)
    assert answers[0] == answers[1]
    expected = [
        cuts(len(prompt), BLOCK_SIZE, EvictionConfig(**settings), 200) for prompt in PROMPTS[:3]
    ]
    assert rounds == [sum(map(len, expected))] * 2


def test_a_budget_that_is_never_reached_gives_stocks_tokens(start: EngineFactory) -> None:
    prompts = PROMPTS[:3]
    answers = []
    for eviction in (None, {"method": "snapkv", "budget": 1.0, "decode_budget": 1000}):
        with start(eviction, 60) as engine:
            outputs = engine.outputs(prompts, 150, logprobs=1)
            answers.append([(each.token_ids, each.logprobs) for each in outputs])
    assert answers[0] == answers[1]


def test_requests_hold_no_more_than_budget_and_interval(start: EngineFactory) -> None:
    most: list[int] = []
    with start({"method": "adakv-perturb", "budget": 1.0, **ROUNDS}, 60) as engine:
        watch(engine, most)
        engine.generate(PROMPTS[:2], 400)
        assert engine.blocks_in_use() == 0
    # Two requests; each a partial block more, and one for the token at hand.
    assert max(most) <= 2 * (-(-(DECODE_BUDGET + INTERVAL) // BLOCK_SIZE) + 2)


def watch(engine: Engine, most: list[int]) -> None:
    """Notes the blocks in use after every step."""
    schedule = engine.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        most.append(engine.blocks_in_use())
        return output

    engine.scheduler.schedule = watched
