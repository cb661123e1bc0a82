"""Sliding windows beside full attention: a tiny Gemma 3, whose sliding layers stay vLLM's own."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.engine.conftest import (
    BLOCK_SIZE,
    Answer,
    Engine,
    EngineFactory,
    _engine,
    preempting_all,
)
from tests.engine.float64 import BUDGET, num_packed, tail_begin
from tests.engine.float64_model import Answer as ExpectedAnswer
from tests.engine.float64_model import Model
from tests.engine.random_models import SHAPE, random_gemma3, random_prompts
from tests.engine.recorder import Recorder, recording
from tests.method_cases import MethodCase
from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.block_manager import WindowManager

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("windows")]
EVICTION = {"budget": BUDGET, "allow_override": ["method", "budget"]}
METHODS = ("adakv-perturb", "snapkv", "h2o", "random", "defensivekv", "pyramidkv", "layer-thetakv")
CASES = [MethodCase(name) for name in METHODS]
PROMPTS = random_prompts([300 + 7 * index for index in range(len(CASES))])
NOTHING_DROPPED = {"kv_eviction": "none"}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_gemma3(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def start(gemma: Path) -> Iterator[EngineFactory]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        settings = {"skip_tokenizer_init": True, "block_size": BLOCK_SIZE, "max_model_len": 1024}
        yield partial(_engine, model=gemma, **settings)


class Served(NamedTuple):
    """Answers of all methods at once, their prompts in chunks, preempted on the way."""

    answers: list[Answer]
    recorder: Recorder


@pytest.fixture(scope="module")
def served(start: EngineFactory) -> Served:
    extra_args: Any = [{"kv_eviction": case.method} for case in CASES]
    with (
        start(EVICTION, 40, max_num_batched_tokens=384) as engine,
        recording(engine.worker.model_runner) as recorder,
        preempting_all(4) as preempted,
    ):
        answers = engine.generate(PROMPTS, 40, extra_args)
        # One that had its first token only was yet to be packed.
        num_packed_again = sum(count > 1 for count in preempted)
        assert engine.worker.kv_eviction_stats()["num_evicted"] == len(CASES) + num_packed_again
    return Served(answers, recorder)


@pytest.mark.parametrize("index", range(len(CASES)), ids=METHODS)
def test_full_attention_drops_as_the_oracle_and_sliding_layers_drop_nothing(
    index: int, served: Served, gemma: Path
) -> None:
    prompt, answer = PROMPTS[index], served.answers[index]
    oracle = ExpectedAnswer(Model(gemma), prompt, CASES[index])
    logits = oracle.logits(answer.token_ids)
    assert logits.argmax(-1).tolist() == answer.token_ids
    logprobs = logits.log_softmax(-1).amax(-1).tolist()
    assert answer.logprobs == pytest.approx(logprobs, abs=1e-3)
    full = [2, 5]
    assert {layer for layer, _ in oracle.expected} == {*full}
    for (layer, head), expected in oracle.expected.items():
        retained = served.recorder.retained[len(prompt), full.index(layer)]
        tokens = {token for owner, token in retained if owner == head}
        assert len(tokens) == expected.count
        expected.check(tokens)


def test_nothing_dropped_is_stock(start: EngineFactory) -> None:
    prompts, answers = random_prompts([40, 150, 333]), []
    for eviction in (None, {"method": "adakv-perturb", "budget": 512}):
        with start(eviction, 40) as engine:
            answers.append(
                [(o.token_ids, o.logprobs) for o in engine.outputs(prompts, 24, logprobs=1)]
            )
    assert answers[0] == answers[1]


def blocks_by_group(engine: Engine, prompt: list[int], **settings: Any) -> list[list[int]]:
    """Blocks that a request holds of every group after each step, freed ones aside."""
    held, schedule = [], Scheduler.schedule

    def record(scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
        output = schedule(scheduler, *args, **kwargs)
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        tables = [[b for t in m.req_to_blocks.values() for b in t] for m in managers]
        held.append([sum(not block.is_null for block in table) for table in tables])
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "schedule", record)
        engine.outputs([prompt], 80, [settings])
    return held


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


def test_the_same_request_again_hits_below_its_packed_blocks(start: EngineFactory) -> None:
    prompts = random_prompts([500, 420])
    hits = []
    with start(EVICTION, 60) as engine:
        manager = engine.scheduler.kv_cache_manager
        lookup = manager.get_computed_blocks

        def record(request: Any) -> Any:
            result = lookup(request)
            hits.append(result[1])
            return result

        manager.get_computed_blocks = record
        first = engine.generate_alone(prompts, 40)
        # A request that drops nothing hashes all of its blocks: the next hit has to be cut.
        engine.generate(prompts, 1, [NOTHING_DROPPED] * 2)
        assert engine.generate(prompts, 40) == first
        assert engine.generate_alone(prompts, 40) == first
    packed = [(tail_begin(len(p)) // BLOCK_SIZE - num_packed(len(p))) * BLOCK_SIZE for p in prompts]
    assert hits == [0, 0, *packed, *packed, *packed]


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


def test_attention_sinks_are_refused(tmp_path: Path, start: EngineFactory) -> None:
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **SHAPE,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 64,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = "layers with attention sinks; serve this model without --kv-eviction"
    with (
        pytest.raises(ConfigError, match=message),
        start(EVICTION, 40, model=tmp_path, load_format="dummy"),
    ):
        pass
