"""`auto` takes the best method that a model allows, and says which and why."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import EngineFactory
from tests.engine.random_hybrids import falcon_h1, saved
from tests.engine.random_models import random_gemma3, random_llama, with_positions_of_several_parts
from tests.engine.test_arguments import parse, said
from tests.engine.test_unreadable_projections import PROMPT
from tests.probe_files import probe_of
from vllm_kvselect.config import CONFIG_KEY, ConfigError
from vllm_kvselect.engine.scheduler.cut_scheduler import CutAsyncScheduler, CutScheduler
from vllm_kvselect.registry import METHODS, PREFERRED
from vllm_kvselect.tiny_model import tiny_model

AUTO = ("--kv-eviction", "auto", "--kv-eviction-budget", "0.25")
BLOCKS = ("--block-size", "32")
LONG = ("--max-model-len", "8192")
IN_ROUNDS = ("--kv-eviction-decode-budget", "256")


def chosen(*command: str) -> str:
    """The method that every process is told."""
    method: str = config_of(*command).additional_config[CONFIG_KEY]["method"]
    return method


def config_of(*command: str) -> Any:
    return parse("--dtype", "float32", *command).create_engine_config()


def without_tokenizer(folder: Path) -> tuple[str, ...]:
    return ("--model", str(folder), "--skip-tokenizer-init", "--max-model-len", "512")


def test_any_model_and_any_setting_allows_the_last_choice() -> None:
    last = METHODS[PREFERRED[-1]]
    assert not last.needs
    assert last.in_rounds
    assert not last.pooled


def test_a_probe_at_hand_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(*AUTO)
    assert config.additional_config[CONFIG_KEY]["method"] == "layer-probe"
    assert config.scheduler_config.get_scheduler_cls() in (CutScheduler, CutAsyncScheduler)
    (_, choice), (_, retained) = said(caplog, *AUTO)
    assert choice == "KV eviction auto takes layer-probe (a probe of this model is at hand)"
    assert retained.startswith("KV eviction layer-probe: retains 512 entries")


@pytest.mark.parametrize(
    ("options", "interval"),
    [
        ((), 2048),
        (("--kv-eviction-decode-budget", "512"), 2048),
        (("--kv-eviction-allow-override", "method", "prompt_interval"), 2048),
        (("--kv-eviction-prompt-interval", "0"), 0),
        (("--kv-eviction-prompt-interval", "512"), 512),
        (("--no-enable-prefix-caching",), 0),  # nobody would find what a cut leaves
        (("--max-model-len", "2048"), 0),
        (("--kv-prefill", "critiprefill", "--max-num-batched-tokens", "4096"), 0),
    ],
)
def test_prompts_are_cut_where_that_suits_the_method_and_nothing_else_is_asked_for(
    options: tuple[str, ...], interval: int
) -> None:
    command = ("--kv-eviction-budget", "0.25", *LONG, *options)
    settings = config_of(*command).additional_config[CONFIG_KEY]
    assert (settings["method"], settings["prompt_interval"]) == ("layer-probe", interval)


def test_contexts_for_a_folder_are_marked_and_drafters_find_no_states(tmp_path: Path) -> None:
    drafter = {"method": "draft_model", "model": str(tiny_model()), "num_speculative_tokens": 2}
    for options in (
        ("--kv-eviction-context", "1000", "--kv-eviction-context-store", str(tmp_path / "store")),
        ("--speculative-config", json.dumps(drafter)),
    ):
        settings = config_of(*AUTO, *LONG, *BLOCKS, *options).additional_config[CONFIG_KEY]
        assert (settings["method"], settings["prompt_interval"]) == ("layer-probe", 0)


@pytest.mark.parametrize("make", [random_gemma3, partial(saved, falcon_h1)])
def test_where_states_are_not_shared_none_are_made(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    """Beside windows, and beside states of the model's own in the same layers."""
    probe = ("--kv-eviction-probe", str(probe_of(random_llama(tmp_path / "llama", 2))))
    make(tmp_path / "model")
    model = ("--model", str(tmp_path / "model"), "--skip-tokenizer-init", "--max-model-len", "4096")
    options = (*model, *probe, "--enable-prefix-caching")
    settings = config_of(*AUTO, *options).additional_config[CONFIG_KEY]
    assert (settings["method"], settings["prompt_interval"]) == ("layer-probe", 0)


def test_the_log_says_that_prompts_are_cut_and_how_to_leave_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (_, choice), (_, retained) = said(caplog, *AUTO, *LONG)
    assert choice.endswith(
        " and cuts prompts every 2048 tokens (--kv-eviction-prompt-interval 0 to cut them at their "
        "ends alone)"
    )
    assert "; drops while it is computed every 2048 tokens" in retained


def test_a_method_that_is_named_cuts_prompts_at_their_ends_alone() -> None:
    settings = config_of("--kv-eviction", "layer-probe", *LONG).additional_config[CONFIG_KEY]
    assert settings["prompt_interval"] == 0


def test_without_a_probe_the_next_best_is_taken_and_the_command_for_one_shown(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = (*AUTO, *without_tokenizer(llama))
    assert chosen(*command) == "layer-defensivekv"
    (_, choice), *_ = said(caplog, *command)
    assert choice.startswith("KV eviction auto takes layer-defensivekv (not layer-probe: there is ")
    assert f"`vllm-kvselect calibrate {llama}`" in choice
    assert "cuts prompts" not in choice  # it cannot


def test_a_named_probe_is_taken_and_checked_when_the_model_is_loaded(llama: Path) -> None:
    probe = ("--kv-eviction-probe", str(probe_of(llama)))
    assert chosen(*AUTO, *without_tokenizer(llama), *probe) == "layer-probe"


def test_weights_that_are_not_here_yet_have_no_probe(tmp_path: Path, llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    assert chosen(*AUTO, *without_tokenizer(llama)) == "layer-defensivekv"


def test_a_probe_is_taken_with_a_decode_budget() -> None:
    assert chosen(*AUTO, *IN_ROUNDS) == "layer-probe"


def test_without_a_probe_the_best_that_can_be_made_in_rounds_is_taken(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = (*AUTO, *without_tokenizer(llama), *IN_ROUNDS)
    assert chosen(*command) == "thetakv"
    (_, choice), *_ = said(caplog, *command)
    assert "not layer-defensivekv: with decode_budget, it compares a token over heads" in choice


def test_without_a_probe_the_best_that_can_cut_prompts_is_taken(llama: Path) -> None:
    options = ("--kv-eviction-prompt-interval", "128")
    assert chosen(*AUTO, *without_tokenizer(llama), *options) == "thetakv"


def test_where_layers_cannot_share_pages_heads_of_a_layer_do() -> None:
    assert chosen(*AUTO, "--pipeline-parallel-size", "2") == "thetakv"


@pytest.mark.parametrize("language_only", [False, True])
def test_methods_that_take_no_images_are_taken_for_text_alone(
    language_only: bool, tmp_path: Path
) -> None:
    folder = random_llama(tmp_path / "model", num_layers=2)
    own = ("--kv-eviction-probe", str(probe_of(folder)))
    with_positions_of_several_parts(folder)
    only = ("--language-model-only",) if language_only else ()
    method = chosen(*AUTO, *without_tokenizer(folder), *own, *only)
    assert method == ("layer-probe" if language_only else "layer-defensivekv")


def test_it_may_stand_in_a_file_and_in_additional_config(tmp_path: Path) -> None:
    file = tmp_path / "auto.yaml"
    file.write_text("method: auto\nbudget: 0.25\n")
    assert chosen("--kv-eviction-config", str(file)) == "layer-probe"
    additional = '{"kv_eviction": {"method": "auto", "budget": 0.25}}'
    assert chosen("--additional-config", additional) == "layer-probe"
    assert chosen("--additional-config", additional, *AUTO) == "layer-probe"


def test_a_misspelt_method_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--kv-eviction", "layer-prob")
    assert "did you mean 'layer-probe'?" in capsys.readouterr().err


@pytest.mark.engine
def test_a_server_answers_by_what_was_chosen_and_requests_may_name_it_auto(
    start_small: EngineFactory, llama: Path
) -> None:
    with start_small({"method": "auto"}, model=llama) as engine:
        own, auto = engine.generate_alone([PROMPT] * 2, 4, [None, {"kv_eviction": "auto"}])
        assert own == auto
        assert engine.worker.kv_eviction_stats()["num_evicted"] == 2


@pytest.mark.engine
def test_what_only_the_loaded_model_shows_is_refused_with_the_next_best(
    start_small: EngineFactory, persimmon: Path
) -> None:
    remedy = r"found 0 output projections.*; the best without it is --kv-eviction snapkv$"
    auto = {"method": "auto"}
    with pytest.raises(ConfigError, match=remedy), start_small(auto, model=persimmon):
        pass
