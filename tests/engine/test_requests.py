"""Settings of single requests on a real engine: each answers as on a server of its own."""

import copy
from collections.abc import AsyncIterator, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import BeamSearchParams
from vllm.v1.core.sched.scheduler import Scheduler

from tests.engine.conftest import EngineFactory
from vllm_kvselect.config import METHOD_NAMES, OVERRIDE_NAMES, ConfigError, EvictionConfig
from vllm_kvselect.engine.frontend.checks import settings_problems
from vllm_kvselect.engine.frontend.requests import RequestRefusedError, check_request
from vllm_kvselect.request import REQUEST_KEYS
from vllm_kvselect.tiny_model import tiny_model

SERVER = {"method": "adakv-perturb", "budget": 128}
OPEN = SERVER | {"allow_override": ["method", "budget"]}
SETTINGS: list[dict[str, Any] | None] = [
    None,
    {"kv_eviction": "streaming-llm", "kv_eviction_budget": 0.4},
    {"kv_eviction": "none"},
]
SERVERS = [
    SERVER,
    {"method": "streaming-llm", "budget": 0.4},
    None,  # vLLM without eviction
]


def test_each_request_answers_as_on_a_server_with_its_settings(
    start_engine: EngineFactory, make_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts([560, 640, 420])
    expected = []
    for prompt, eviction in zip(prompts, SERVERS, strict=True):
        with start_engine(eviction, 200, block_size=32) as engine:
            expected += engine.generate([prompt], 64)

    schedule = Scheduler.schedule
    steps: Iterator[int] = count()

    def schedule_or_preempt(scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
        if next(steps) in (20, 45):
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return schedule(scheduler, *args, **kwargs)

    with start_engine(OPEN, 200, disable_log_stats=False) as engine:
        assert engine.generate(prompts, 64, SETTINGS) == expected
        # The same prompts again, from the prefix cache as far as each one's settings let it.
        assert engine.generate(prompts[::-1], 64, SETTINGS[::-1]) == expected[::-1]
        monkeypatch.setattr(Scheduler, "schedule", schedule_or_preempt)
        assert engine.generate(prompts, 64, SETTINGS) == expected
        assert engine.worker.kv_eviction_stats()["num_evicted"] == 2 * (1 + 1 + 3)
        assert engine.blocks_in_use() == 0
        # Packed again after each preemption, but counted once.
        counted = {metric.name: metric for metric in engine.llm.get_metrics()}
        assert counted["vllm:kv_eviction_requests"].value == 2 * 3
        assert counted["vllm:kv_eviction_selection_seconds"].count == 1 + 1 + 3


def test_nothing_is_saved_any_more_once_the_answers_are_there(
    start_engine: EngineFactory, make_prompts: Any
) -> None:
    with start_engine(SERVER, 200, disable_log_stats=False) as engine:

        def num_saved() -> float:
            counted = {
                metric.name: metric.value
                for metric in engine.llm.get_metrics()
                if metric.name == "vllm:kv_eviction_saved_blocks"
            }
            return counted["vllm:kv_eviction_saved_blocks"]

        for prompts in (make_prompts([560]), make_prompts([420, 640], 3000)):
            names = [
                engine.llm.llm_engine.add_request(
                    str(i), {"prompt_token_ids": prompt}, engine.sampling(8 + i, None)
                )
                for i, prompt in enumerate(prompts)
            ]
            seen = []
            while engine.llm.llm_engine.has_unfinished_requests():
                engine.llm.llm_engine.step()
                seen.append(num_saved())
            assert names
            assert max(seen) > 0
            assert min(seen) == seen[-1] == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kv_eviction": "snapkw"}, "'snapkw' is not accepted"),
    ({"kv_eviction_budget": 0}, "kv_eviction_budget = 0 is not accepted"),
    ({"kv_eviction_budget": 63}, "at least 64 are needed"),
    ({"kv_eviction_budget": 0.01}, "retains 21 entries of 2048 tokens"),
    ({"kv_eviction": "snapkv"}, "start it with --kv-eviction-allow-override method"),
    ({"kv_eviction_windows": 8}, "unknown key 'kv_eviction_windows'"),
]


def test_a_refused_request_is_an_error_and_the_engine_goes_on(
    start_engine: EngineFactory, make_prompts: Any
) -> None:
    prompts = make_prompts([500, 600])
    with start_engine(SERVER | {"allow_override": ["budget"]}, 100) as engine:
        expected = engine.generate(prompts)
        for extra_args, message in REFUSED:
            for error in (ValueError, RequestRefusedError):
                with pytest.raises(error, match=message):
                    engine.generate(prompts, 8, [None, extra_args])
            assert not engine.llm.llm_engine.has_unfinished_requests()
            assert engine.blocks_in_use() == 0
        assert engine.generate(prompts) == expected


CUTTING = [
    SERVER,
    SERVER | {"prompt_interval": 128},
    SERVER | {"context": 256, "allow_override": ["method"]},
    SERVER | {"decode_budget": 128, "decode_interval": 32},
    SERVER
    | {"prefill": "critiprefill", "prefill_budget": 64, "prefill_dense_until": 128}
    | {"prefill_segment": 64},
]


def test_a_beam_search_is_stock_vllms(start_engine: EngineFactory, make_prompts: Any) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in make_prompts([500, 300])]
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    found = []
    for eviction in (*CUTTING, None):
        with start_engine(eviction, 200, block_size=32, skip_tokenizer_init=False) as engine:
            outputs = engine.llm.beam_search(prompts, params)
            found.append([beam for output in outputs for beam in output.sequences])
            if eviction:
                stats = engine.worker.kv_eviction_stats()
                assert stats["num_evicted"] == stats["selection_seconds"] == 0
                assert stats["estimate_seconds"] == 0
                # Nothing is a step of it any more.
                engine.generate([prompts[0]["prompt_token_ids"]], 40)
                assert engine.worker.kv_eviction_stats()["selection_seconds"] > 0
    *ours, stock = found
    expected = [beam.cum_logprob for beam in stock]
    for beams in ours:
        assert [beam.tokens for beam in beams] == [beam.tokens for beam in stock]
        assert [beam.cum_logprob for beam in beams] == pytest.approx(expected, abs=1e-3)


def engine_of(additional_config: Any, vllm_config: Any = None) -> Any:
    vllm_config = copy.copy(vllm_config or SimpleNamespace())
    vllm_config.additional_config = additional_config
    return SimpleNamespace(vllm_config=vllm_config, logger_manager=None)


def can_be_served(vllm_config: VllmConfig | None, values: dict[str, Any]) -> bool:
    """Whether these settings go together, and with this vLLM if one is given."""
    try:
        asked = EvictionConfig.parse(values)
    except ConfigError:
        return False
    return not (vllm_config and asked.enabled and settings_problems(vllm_config, asked))


POOL = (0, 20, 64, 128, 512, 0.01, 0.125, 1.0, "dense", "critiprefill")
VALUES = {
    key: [
        value
        for value in (*POOL, *METHOD_NAMES)
        if can_be_served(None, {"method": "none", field: value})
    ]
    for key, field in REQUEST_KEYS.items()
}
"""What each setting accepts alone: of some of it a server or a request can have no use."""

chosen = st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in VALUES.items()})


@pytest.fixture(scope="module")
def stock_config() -> VllmConfig:
    return EngineArgs(model=str(tiny_model()), max_model_len=2048).create_engine_config()


@settings(max_examples=500, deadline=None, derandomize=True)
@given(chosen, chosen)
def test_what_a_request_asks_for_is_judged_as_a_whole_in_any_order(
    stock_config: VllmConfig, defaults: dict[str, Any], own: dict[str, Any]
) -> None:
    values: dict[str, Any] = {"allow_override": [*OVERRIDE_NAMES]}
    values["method"] = "adakv-perturb"
    for key, value in defaults.items():
        more = values | {REQUEST_KEYS[key]: value}
        if can_be_served(stock_config, more):
            values = more
    server = EvictionConfig.parse(values)
    whole = server.model_dump() | {REQUEST_KEYS[key]: value for key, value in own.items()}
    can_be = can_be_served(stock_config, whole)
    engine = engine_of({"kv_eviction": values}, stock_config)
    for order in ([*own], [*own][::-1]):
        params = SamplingParams(extra_args={key: own[key] for key in order})
        if can_be:
            check_request(engine, {"prompt_token_ids": [1]}, params)
            continue
        with pytest.raises(RequestRefusedError) as caught:
            check_request(engine, {"prompt_token_ids": [1]}, params)
        _, _, key = str(caught.value.parameter).partition(".")
        assert key in own


def test_a_prompt_that_grows_while_it_is_served_is_refused() -> None:
    async def prompts() -> AsyncIterator[str]:
        yield "never asked for"

    engine = engine_of({"kv_eviction": {"method": "adakv", "budget": 128}})
    with pytest.raises(RequestRefusedError, match="send the whole prompt at once"):
        check_request(engine, prompts(), SamplingParams())


@pytest.mark.parametrize(
    "additional_config", [{}, {"other": 1}, {"kv_eviction": {"method": "none"}}, object()]
)
def test_a_stock_engine_takes_whatever_stock_vllm_takes(additional_config: Any) -> None:
    params = SamplingParams(extra_args={"kv_eviction": "nonsense", "kv_eviction_x": 1})
    check_request(engine_of(additional_config), {"prompt_token_ids": [1]}, params)


def test_a_server_that_evicts_only_on_demand(
    start_engine: EngineFactory, make_prompts: Any
) -> None:
    prompts = make_prompts([700, 800])
    on_demand = {"method": "none", "allow_override": ["method"], "budget": 128}
    with start_engine(SERVER, 200) as engine:
        (evicted,) = engine.generate(prompts[:1])
    with start_engine(on_demand, 200) as engine:
        settings = [{"kv_eviction": "adakv-perturb"}, None]
        answers = engine.generate(prompts, extra_args=settings)
        assert engine.worker.kv_eviction_stats()["num_evicted"] == 1
    with start_engine(None, 200, block_size=32) as engine:
        # Stock vLLM leaves other people's keys alone, and so do we without --kv-eviction.
        (stock,) = engine.generate(prompts[1:], extra_args=[{"kv_eviction": "adakv"}])
    assert answers == [evicted, stock]
