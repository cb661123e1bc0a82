from pathlib import Path
from typing import Any

import pytest

from vllm_kvselect.config import ConfigError
from vllm_kvselect.evaluation.predictions import Setting
from vllm_kvselect.evaluation.settings import FULL, EvaluationConfig
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.probes import named


def parse(**values: Any) -> EvaluationConfig:
    return EvaluationConfig.parse({"suite": "needles", "methods": ("snapkv",)} | values)


def test_the_full_cache_is_measured_once_and_first() -> None:
    config = parse(methods=("snapkv", "none", "random"), budgets=(0.5, 512))
    assert config.settings("regular") == [
        Setting("regular", FULL, None, "model"),
        Setting("regular", "snapkv", 0.5, "model"),
        Setting("regular", "snapkv", 512, "model"),
        Setting("regular", "random", 0.5, "model"),
        Setting("regular", "random", 512, "model"),
    ]


def test_further_fields_reach_every_method() -> None:
    config = parse(methods=("snapkv", "adakv"), eviction={"window": 8, "alpha": 0.25})
    assert {(each.window, each.alpha) for each in config.evictions()} == {(8, 0.25)}


def test_a_method_may_have_a_field_changed() -> None:
    config = parse(methods=("thetakv", "thetakv:lam=0.0:alpha=1.0"), eviction={"alpha": 0.25})
    assert [(each.lam, each.alpha) for each in config.evictions()] == [(1.0, 0.25)] * 3 + [
        (0.0, 1.0)
    ] * 3
    names = [each.method for each in config.settings("regular")]
    assert names == [FULL] + ["thetakv"] * 3 + ["thetakv:lam=0.0:alpha=1.0"] * 3


def test_without_eviction_there_is_one_setting_whatever_the_budgets() -> None:
    sparse = "none:prefill=critiprefill:prefill_budget=512"
    config = parse(methods=("none", sparse), through="engine")
    assert config.settings("regular") == [
        Setting("regular", FULL, None, "engine"),
        Setting("regular", sparse, None, "engine"),
    ]
    assert [(each.enabled, each.prefill_budget) for each in config.evictions()] == [(False, 512)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"suite": "glue"}, "suite = 'glue'"),
        ({"num_examples": 0}, "num_examples = 0"),
        ({"lengths": (100,)}, "lengths.0 = 100"),
        ({"scenarios": ()}, r"scenarios = \(\)"),
        ({"sccenarios": ("regular",)}, "sccenarios"),
        ({"dtype": "int8"}, "dtype = 'int8'"),
        ({"eviction": {"context": 500}}, "add --scenarios context-only"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype is of a server that is started here"),
        ({"methods": ("thetakv:context=500",)}, "add --scenarios context-only"),
        ({"methods": ("thetakv:lam",)}, "'lam' is not of the form name=value"),
        ({"methods": ("thetakv",), "against": "snapkv"}, "add it to --methods"),
        ({"methods": ("none:prefill=critiprefill",)}, "add --through engine"),
        ({"methods": ("snapkv",), "eviction": {"decode_budget": 64}}, "add --through engine"),
        (
            {"methods": ("thetakv:lam=0.0",), "through": "engine"},
            "give it to the server with --set",
        ),
        ({"suite": "own-answers"}, "add --through engine"),
        ({"suite": "stories"}, "add --through engine"),
        ({"through": "kvpress"}, "through = 'kvpress'"),
        ({"url": "http://localhost:8000"}, "add --through engine"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        parse(**values)


@pytest.mark.parametrize(
    "values", [{"methods": ("snapkw",)}, {"budgets": (0,)}, {"eviction": {"windows": 8}}]
)
def test_what_a_server_refuses_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse(**values)


def test_it_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse().out = Path("elsewhere")


@pytest.mark.parametrize("name", ["layer-thetakv", "kvzip"])
def test_a_server_is_not_asked_for_what_it_does_not_serve(name: str) -> None:
    with pytest.raises(EvaluationError, match=f"{name} is not served, .* comes nearest"):
        parse(methods=(name,), through="engine")
    assert parse(methods=(name,), through="model").methods == (name,)


@pytest.mark.parametrize(
    ("method", "eviction", "meant"),
    [
        ("auto", {}, "layer-defensivekv"),
        ("auto:lam=0.0", {"decode_budget": 512}, "thetakv:lam=0.0"),
        ("auto", {"probe": "file"}, "layer-probe"),
        ("snapkv", {}, "snapkv"),
    ],
)
def test_auto_is_what_a_server_would_choose(
    method: str, eviction: dict[str, Any], meant: str, tmp_path: Path
) -> None:
    assert named(method, str(tmp_path), eviction) == meant


def test_auto_is_the_probe_of_the_small_model() -> None:
    assert named("auto", "", {}) == "layer-probe"
