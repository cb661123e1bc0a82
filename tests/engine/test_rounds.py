"""Rounds in real engines: a float64 model's word on every entry and every token."""

from pathlib import Path

import pytest

from tests.engine.all_rounds import CASES, DECODE_BUDGET, INTERVAL, ROUNDS, Served, serve
from tests.engine.conftest import BLOCK_SIZE, EngineFactory, every_architecture, preempting_all
from tests.engine.random_models import random_prompts
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.planning.cuts import cuts

pytestmark = pytest.mark.xdist_group("rounds")
NUM_GENERATED = 180
# Some are cut at their end, some only in rounds; rounds begin at different lengths.
PROMPTS = random_prompts([40 + 31 * index for index in range(len(CASES))])
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@pytest.fixture(scope="module")
def served(start: EngineFactory) -> Served:
    return serve(start, PROMPTS, NUM_GENERATED, **ROUNDS)


@every_architecture
@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.method for case in CASES])
def test_every_round_and_every_token_is_as_the_float64_model_says(
    index: int, served: Served, random_model: Path
) -> None:
    served.check(index, random_model)


def test_rounds_count_accepted_tokens_only(start: EngineFactory) -> None:
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


def test_the_only_round_of_a_request_is_made_again_where_it_was(start: EngineFactory) -> None:
    """A chunk of a resumed request ends there, too."""
    [prompt] = random_prompts([200])
    eviction = {"method": "snapkv", "budget": 1.0, "decode_budget": 96, "decode_interval": 64}
    made = cuts(len(prompt), BLOCK_SIZE, EvictionConfig.parse(eviction), 80)
    assert [cut.position for cut in made] == [264]
    with start(eviction, 40) as engine:
        expected = engine.generate([prompt], 80)
        with preempting_all(1, num_tokens=70) as preempted:
            assert engine.generate([prompt], 80) == expected
        assert preempted == [70]


def test_a_budget_that_is_never_reached_gives_stocks_tokens(start: EngineFactory) -> None:
    prompts = PROMPTS[:3]
    answers = []
    for eviction in (None, {"method": "snapkv", "budget": 1.0, "decode_budget": 1000}):
        with start(eviction, 60) as engine:
            outputs = engine.outputs(prompts, 150, logprobs=1)
            answers.append([(each.token_ids, each.logprobs) for each in outputs])
    assert answers[0] == answers[1]


def test_requests_hold_no_more_than_budget_and_interval(start: EngineFactory) -> None:
    with start({"method": "adakv-perturb", "budget": 1.0, **ROUNDS}, 60) as engine:
        most = engine.record_blocks()
        engine.generate(PROMPTS[:2], 400)
        assert engine.blocks_in_use() == 0
    # Two requests; each a partial block more, and one for the token at hand.
    assert max(most) <= 2 * (-(-(DECODE_BUDGET + INTERVAL) // BLOCK_SIZE) + 2)
