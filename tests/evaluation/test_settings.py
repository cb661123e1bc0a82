from pathlib import Path
from typing import Any

import pytest

from vllm_kvselect.analysis.errors import EvaluationError
from vllm_kvselect.config import ConfigError
from vllm_kvselect.evaluation.predictions import Setting
from vllm_kvselect.evaluation.settings import FULL, EvaluationConfig


def parse(**values: Any) -> EvaluationConfig:
    return EvaluationConfig.parse({"suite": "needles"} | values)


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"suite": "glue"}, "suite = 'glue'"),
        ({"num_examples": 0}, "num_examples = 0"),
        ({"lengths": (100,)}, "lengths.0 = 100"),
        ({"scenarios": ()}, r"scenarios = \(\)"),
        ({"sccenarios": ("regular",)}, "sccenarios"),
        ({"dtype": "int8"}, "dtype = 'int8'"),
        (
            {"suite": "harness", "through": "engine", "scenarios": ("context-only",)},
            "does not tell texts and questions apart",
        ),
        ({"eviction": {"context": 500}}, "add --scenarios context-only"),
        ({"suite": "harness"}, "add --through engine"),
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
