"""What an evaluation asks a server for is what it means, whatever the server's own settings are."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.evaluation import served
from vllm_kvselect.evaluation.endpoint import request_settings
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.evaluation.suites.instructions import FREE, instructions
from vllm_kvselect.request import REQUEST_KEYS, request_config

SERVER = EvictionConfig.parse(
    {"method": "thetakv", "budget": 512, "allow_override": list(REQUEST_KEYS.values())}
    | {"prefill": "critiprefill", "prefill_budget": 1024}
    | {"decode_budget": 512, "decode_interval": 64}
)
SPARSE = {"prefill": "critiprefill", "prefill_budget": 512}


@pytest.mark.parametrize(
    "asked",
    [
        {"method": "none"},
        {"method": "none", **SPARSE},
        {"method": "snapkv", "budget": 0.25},
        {"method": "snapkv", "budget": 0.25, **SPARSE},
        {"method": "snapkv", "budget": 256, "decode_budget": 128, "decode_interval": 256},
        {"method": "layer-probe", "budget": 256, "context": 64},
    ],
)
def test_a_request_gets_what_the_evaluation_means(asked: dict[str, Any]) -> None:
    meant = EvictionConfig.parse(asked)
    got = request_config(SERVER, request_settings(meant))
    matters = set(REQUEST_KEYS.values())
    if not meant.enabled:
        matters = {"method", "prefill", "prefill_budget"}
    if not meant.decode_budget:
        matters.discard("decode_interval")
    if meant.prefill == "dense":
        matters.discard("prefill_budget")
    assert {key: getattr(got, key) for key in matters} == {
        key: getattr(meant, key) for key in matters
    }


@pytest.mark.parametrize(
    ("task", "is_given"), [("secret", True), (f"secret{FREE}", False)], ids=["read along", "free"]
)
def test_a_server_is_started_to_give_answers_where_they_are_read_along(
    task: str,
    is_given: bool,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class StartedError(Exception):
        pass

    def serving(console: Console, name: str, model: str, flags: list[str], *_: Any) -> None:
        assert ("--logits-processors" in flags) == is_given
        raise StartedError

    monkeypatch.setattr("vllm_kvselect.evaluation.endpoint.serving", serving)
    config = EvaluationConfig.parse(
        {"suite": "instructions", "tasks": (task,), "lengths": (800,), "num_examples": 1}
        | {"through": "engine", "methods": ("snapkv",), "out": tmp_path}
    )
    with pytest.raises(StartedError):
        next(served.answer(config, instructions(config, tokenizer), set()))
