"""Attention sinks: a tiny gpt-oss, whose query heads have a logit of their own in every softmax."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.engine.all_methods import METHODS, Served, check_method, serve_all_methods
from tests.engine.conftest import BLOCK_SIZE, EngineFactory, _engine
from tests.engine.random_models import random_gpt_oss, random_prompts

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("sinks")]


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_gpt_oss(tmp_path_factory.mktemp("gpt-oss"))


@pytest.fixture(scope="module")
def start(gpt_oss: Path) -> Iterator[EngineFactory]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        settings = {"skip_tokenizer_init": True, "block_size": BLOCK_SIZE, "max_model_len": 1024}
        yield partial(_engine, model=gpt_oss, **settings)


@pytest.fixture(scope="module")
def served(start: EngineFactory) -> Served:
    return serve_all_methods(start)


@pytest.mark.parametrize("index", range(len(METHODS)), ids=METHODS)
def test_sinks_count_in_scores_and_in_attention(index: int, served: Served, gpt_oss: Path) -> None:
    check_method(index, served, gpt_oss, full_attention=[1, 3])


def test_nothing_dropped_is_stock(start: EngineFactory) -> None:
    prompts, answers = random_prompts([40, 150, 333]), []
    for eviction in (None, {"method": "adakv-perturb", "budget": 512}):
        with start(eviction, 40) as engine:
            answers.append(
                [(o.token_ids, o.logprobs) for o in engine.outputs(prompts, 24, logprobs=1)]
            )
    assert answers[0] == answers[1]
