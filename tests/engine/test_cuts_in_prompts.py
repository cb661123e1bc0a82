"""Cuts in prompts in real engines: a float64 model's word on every entry and every token."""

from pathlib import Path

import pytest
import torch

from tests.engine.all_rounds import CASES, ROUNDS, Served, serve
from tests.engine.conftest import EngineFactory, every_architecture
from tests.engine.random_models import random_prompts
from vllm_kvselect.selecting.ranking import Candidates

pytestmark = pytest.mark.xdist_group("cuts in prompts")
IN_PROMPTS = {"budget": 96, "prompt_interval": 64, "check_integrity": True}
# The first one is cut once in it, the last ones eight times.
PROMPTS = random_prompts([230 + 31 * index for index in range(len(CASES))])


@pytest.fixture(scope="module")
def served(start: EngineFactory) -> Served:
    return serve(start, PROMPTS, 40, **IN_PROMPTS)


@every_architecture
@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.method for case in CASES])
def test_every_cut_and_every_token_is_as_the_float64_model_says(
    index: int, served: Served, random_model: Path
) -> None:
    served.check(index, random_model)
    made = served.rounds[len(PROMPTS[index])]
    assert [position for position in made if position < len(PROMPTS[index])]
    assert len(PROMPTS[index]) in made


# A step of 29 tokens is full when two requests generate and a third one is prefilled.
@pytest.mark.parametrize(("chunk_size", "num_answering"), [(29, 2), (2048, 6)])
def test_chunks_do_not_matter_and_rounds_go_on(
    start: EngineFactory, random_model: Path, chunk_size: int, num_answering: int
) -> None:
    served = serve(start, PROMPTS, 80, chunk_size, num_answering, **IN_PROMPTS | ROUNDS)
    for index in range(len(CASES)):
        served.check(index, random_model)


def test_no_head_ever_drops_the_first_tokens(
    start: EngineFactory, random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fill a page and a part of another, whatever a method says of them."""
    values = {**IN_PROMPTS, **ROUNDS, "keep_first": 40}
    served = serve(start, PROMPTS, 80, **values)
    for index in range(len(CASES)):
        served.check(index, random_model)
    # A choice in which they compete as all others do is found, whatever the method.
    only_absent = lambda self, ranking, num_first: self.without_absent(ranking)  # noqa: E731
    monkeypatch.setattr(Candidates, "with_first", only_absent)
    served = serve(start, PROMPTS, 80, **values)
    for index in range(len(CASES)):
        with pytest.raises(AssertionError):
            served.check(index, random_model)


CONTEXT, QUESTION = random_prompts([352, 29])
MARKED = {"kv_eviction_context": len(CONTEXT)}


@pytest.mark.parametrize("method", ["adakv-perturb", "layer-probe"])
def test_a_context_is_compressed_with_cuts_in_it_and_shared(
    start: EngineFactory, method: str
) -> None:
    settings = {"method": method, "allow_override": ["context"], **IN_PROMPTS}
    with start(settings, 40) as engine:
        own = engine.generate([CONTEXT + QUESTION], 12, [MARKED])
        num_computed = engine.record_steps(lambda step: step.total_num_scheduled_tokens)
        found = engine.generate([CONTEXT + QUESTION], 12, [MARKED])
        assert sum(num_computed) <= len(QUESTION) + 12
    with start(settings, 40) as engine:
        # Ends with its context, whose last cut nothing of it comes after.
        engine.generate([CONTEXT], 1, [MARKED])
        after = engine.generate([CONTEXT + QUESTION], 12, [MARKED])
    assert own == found == after


def test_a_prompt_longer_than_its_pool_is_answered_and_others_are_refused(
    start: EngineFactory,
) -> None:
    bounded = {"decode_budget": 96, "decode_interval": 64, "allow_override": ["decode_budget"]}
    settings = {"method": "adakv", **IN_PROMPTS, **bounded}
    # 96 + 2 * 64 entries are 7 blocks of 32; the longest request has 32.
    with start(settings, 12) as engine:
        most = engine.record_blocks()
        (answer,) = engine.generate([random_prompts([900])[0]], 100)
        assert len(answer.token_ids) == 100
        assert max(most) <= 8
        with pytest.raises(ValueError, match=r"needs 26 blocks at once, and the KV cache has 11"):
            engine.generate([random_prompts([300])[0]], 700, [{"kv_eviction_decode_budget": 0}])
        with pytest.raises(ValueError, match=r"needs 29 blocks at once.*; ask for two tokens"):
            engine.generate([random_prompts([900])[0]], 1)
        assert engine.generate([QUESTION], 3)
        assert engine.blocks_in_use() == 0


def test_a_prompt_of_embeddings_is_cut_as_its_tokens_are(start: EngineFactory) -> None:
    settings = {"method": "adakv-perturb", **IN_PROMPTS}
    with start(settings, 60, enable_prompt_embeds=True) as engine:
        expected = engine.outputs(PROMPTS[:2], 20)
        embed = engine.worker.model_runner.model.embed_input_ids
        inputs = [{"prompt_embeds": embed(torch.tensor(prompt)).detach()} for prompt in PROMPTS[:2]]
        found = engine.llm.generate(inputs, engine.sampling(20, None), use_tqdm=False)
        assert engine.worker.kv_eviction_stats()["num_evicted"] == 4
    assert [result.outputs[0].token_ids for result in found] == [e.token_ids for e in expected]


def test_an_interval_above_the_prompt_gives_the_tokens_of_one_cut(start: EngineFactory) -> None:
    answers = []
    for interval in (0, 1000):
        settings = {"method": "adakv-perturb", **IN_PROMPTS, "prompt_interval": interval}
        with start(settings, 60) as engine:
            outputs = engine.outputs(PROMPTS[:3], 20, logprobs=1)
            answers.append([(each.token_ids, each.logprobs) for each in outputs])
    assert answers[0] == answers[1]
