"""The probe is bound to the heads that it is of, or the start, or a request, is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.conftest import SHALLOW_LAYERS, EngineFactory
from tests.engine.random_models import random_prompts
from tests.engine.recorder import recording
from tests.engine.test_unreadable_projections import CHOOSING, PROMPT
from tests.probe_files import probe_of
from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.frontend.requests import RequestRefusedError
from vllm_kvselect.probes import places
from vllm_kvselect.probes.places import default_path

REFUSED = "methods that need a calibrated probe cannot be used: "


def test_every_layer_has_its_own_weights(shallow_model: Path, start_engine: EngineFactory) -> None:
    with start_engine({"method": "layer-probe"}, 80) as engine:
        found = [impl.probe for impl in engine.impls]
    for probe, expected in zip(found, load_file(probe_of(shallow_model))["weights"], strict=True):
        assert torch.equal(probe, expected)


@pytest.mark.parametrize("method", ["layer-probe", "ada-probe"])
def test_tokens_of_the_prefix_cache_are_scored_as_if_they_were_computed(
    method: str, start_engine: EngineFactory
) -> None:
    first, other = random_prompts([1980, 700])
    second = [*first[:1280], *other]
    settings = {"method": method, "budget": 256, "check_integrity": True}
    with start_engine(settings, 80) as engine, recording(engine.worker.model_runner) as recorder:
        (alone,) = engine.generate([second])
        expected = {layer: recorder.retained[len(second), layer] for layer in range(SHALLOW_LAYERS)}
        assert engine.llm.reset_prefix_cache()
        engine.generate([first])
        (found,) = engine.results([second], logprobs=0)
        assert found.num_cached_tokens == 1280
    assert {
        layer: recorder.retained[len(second), layer] for layer in range(SHALLOW_LAYERS)
    } == expected
    assert list(found.outputs[0].token_ids) == alone.token_ids


def test_methods_that_do_not_need_a_probe_read_none(start_engine: EngineFactory) -> None:
    with start_engine({"method": "keydiff", "probe": "no such file"}, 80) as engine:
        assert all(impl.probe is None for impl in engine.impls)


def test_without_a_probe_the_start_is_refused_with_the_command_that_makes_one(
    start_small: EngineFactory, llama: Path
) -> None:
    remedy = rf"{REFUSED}there is no probe of {llama}; .*`vllm-kvselect calibrate {llama}`"
    probing = {"method": "layer-probe"}
    with pytest.raises(ConfigError, match=remedy), start_small(probing, model=llama):
        pass


def test_without_a_probe_other_methods_serve_and_requests_for_it_are_refused(
    start_small: EngineFactory, llama: Path
) -> None:
    with start_small({**CHOOSING, "method": "adakv"}, model=llama) as engine:
        (answer,) = engine.outputs([PROMPT], 4, [{"kv_eviction": "keydiff"}])
        assert len(answer.token_ids) == 4
        with pytest.raises(RequestRefusedError, match=rf"{REFUSED}there is no probe of") as caught:
            engine.outputs([PROMPT], 4, [{"kv_eviction": "ada-probe"}])
        assert caught.value.parameter == "extra_args.kv_eviction"


def test_what_calibrate_left_in_the_cache_is_found(start_small: EngineFactory, llama: Path) -> None:
    written = probe_of(llama)
    fingerprint = places.Probe.load(written).facts.model.fingerprint
    kept = default_path("former-name", fingerprint)
    kept.parent.mkdir(parents=True)
    written.rename(kept)
    with start_small({"method": "layer-probe"}, model=llama) as engine:
        found = torch.stack([impl.probe for impl in engine.impls])
        assert torch.equal(found, load_file(kept)["weights"])
        assert len(engine.outputs([PROMPT], 4)[0].token_ids) == 4


@pytest.mark.parametrize(
    "eviction",
    [{"method": "ada-probe"}, {**CHOOSING, "method": "adakv"}],
    ids=["the server's method", "a method that requests may choose"],
)
def test_a_named_file_of_another_model_is_refused_at_the_start(
    start_small: EngineFactory, eviction: dict[str, Any], llama: Path, shallow_model: Path
) -> None:
    other = probe_of(shallow_model)
    reason = rf"{REFUSED}{other} is the probe of {shallow_model.name}, whose weights are not those"
    named = {**eviction, "probe": str(other)}
    with pytest.raises(ConfigError, match=reason), start_small(named, model=llama):
        pass


def test_a_named_file_that_is_not_there_is_refused(start_small: EngineFactory, llama: Path) -> None:
    reason = rf"{REFUSED}there is no file /no/such; make it with"
    named = {"method": "ada-probe", "probe": "/no/such"}
    with pytest.raises(ConfigError, match=reason), start_small(named, model=llama):
        pass
