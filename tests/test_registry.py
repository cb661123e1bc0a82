"""Methods are named parts: every name stands for something, and for the same as ever."""

from dataclasses import fields
from pathlib import Path

import pytest

from tests.own_process import python
from vllm_kvselect.norms import NORMS
from vllm_kvselect.registry import (
    KNOWN_METHODS,
    METHODS,
    PARAMETERS,
    PREFERRED,
    Method,
    nearest,
    not_served,
)
from vllm_kvselect.scopes import SCOPES
from vllm_kvselect.scorers import SCORERS, SERVED

RECORDED = Path(__file__).parent / "recorded_methods.txt"
"""What every name stood for when each was an entry of its own, with nineteen fields: scores, how
pages are allocated, what they are counted by, what is remembered, what else holds."""


def row(name: str, method: Method) -> str:
    """A method as it is recorded."""
    scores = method.scores
    remembered = "probe:ScoresOfTokens" if method.scorer.keeps_scores else None
    if method.weights is not None:
        scores += f" and {method.weights.partition(':')[2]}"
    flags = {
        "two stages": method.norms.two_stages,
        "pooled": method.pooled,
        "pyramid": method.scope.is_pyramid,
        "moves": remembered is not None,
        "replay": method.scorer.replay,
        "whole prompt": method.scorer.whole_prompt,
        "first tokens": bool(method.scorer.num_first),
        "no rounds": bool(method.not_in_rounds),
        **{f"needs {need}": True for need in sorted(method.needs)},
    }
    parts = (
        name,
        scores,
        method.allocator.removesuffix("_pages"),
        method.norms.ranking,
        remembered or ("" if method.scorer.whole_prompt else "last queries"),
        ", ".join(flag for flag, holds in flags.items() if holds),
    )
    return " | ".join(filter(None, parts))


def test_every_name_means_what_it_always_meant() -> None:
    recorded = {
        line.partition(" | ")[0]: line for line in RECORDED.read_text(encoding="utf-8").splitlines()
    }
    assert {name: row(name, method) for name, method in KNOWN_METHODS.items()} == recorded


def test_what_is_served_stands_in_one_of_three_groups() -> None:
    names = [name for group in SERVED.values() for name in group]
    assert names == [*METHODS]
    assert len({*names}) == len(names)
    assert len(SERVED) == 3
    assert {*PREFERRED} <= METHODS.keys()


def test_what_is_served_sees_no_more_than_the_last_queries() -> None:
    assert not [name for name, method in METHODS.items() if method.scorer.served_instead]
    for scorer in SCORERS.values():
        assert not scorer.whole_prompt or scorer.served_instead is not None
        assert not scorer.replay or scorer.served_instead is not None


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("h2o", "snapkv"),
        ("h2o-perturb", "snapkv-perturb"),
        ("layer-expected-attention-perturb", "layer-keydiff"),
        ("ada-kvzip", "ada-probe"),
        ("keydiff-perturb", "keydiff"),
        ("ada-keydiff", "layer-keydiff"),
        ("probe", "layer-probe"),
        ("layer-thetakv", "thetakv"),
    ],
)
def test_what_is_not_served_names_what_comes_nearest(name: str, instead: str) -> None:
    assert f"{instead!r} comes nearest" in str(not_served(name))


def test_the_nearest_method_is_served_and_every_method_that_is_not_has_one() -> None:
    for name in KNOWN_METHODS.keys() - METHODS.keys():
        assert str(not_served(name)).split("'")[1] in METHODS
    assert all(not_served(name) is None for name in ("none", *METHODS))


def test_a_method_is_a_scorer_a_scope_and_a_use_of_norms_once() -> None:
    """No two names mean the same, and a method has few fields of its own."""
    parts = {
        (method.scorer.scores, method.scope, method.norms) for method in KNOWN_METHODS.values()
    }
    assert len(parts) == len(KNOWN_METHODS)
    for method in KNOWN_METHODS.values():
        assert method.scorer in SCORERS.values()
        assert method.scope in SCOPES.values()
        assert method.norms in NORMS.values()
    assert len(fields(Method)) <= 24


def test_no_two_groups_have_a_parameter_of_the_same_name() -> None:
    names = [name for group in PARAMETERS for name in group.model_fields]
    assert len(set(names)) == len(names)


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    assert nearest("layer-prob", METHODS) == "did you mean 'layer-probe'? "
    assert nearest("AdaKV", METHODS) == "did you mean 'adakv'? "
    assert nearest("zzz", METHODS) == ""


NEW_FILE = '''
"""A scorer of a test: later tokens first, and a parameter."""

import torch

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scorers import SCORERS
from vllm_kvselect.scoring.inputs import ScoringInputs


def late_scores(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
    (group,) = SCORERS["late"].parameters
    slope = config.of(group).slope
    places = torch.arange(inputs.num_scored, dtype=torch.float32)
    return (slope * places).expand(len(inputs.key), -1)
'''

NEW_ENTRY = """
from typing import Annotated

from vllm_kvselect import scorers, scoring
from vllm_kvselect.settings import Setting


class Slope(scorers.Parameters):
    slope: Annotated[float, Setting("How steep it is.", option="SLOPE")] = 1.0


scorers.SCORERS["late"] = scorers.Scorer(
    scores="late:late_scores",
    paper="a test",
    summary="later tokens",
    cost="nothing",
    limits="blind",
    parameters=(Slope,),
    not_in_rounds="this test says so",
)
scorers.SERVED["For comparison"] += ("late", "ada-late")
"""

PROBED = """
import argparse

import torch
from typer.testing import CliRunner

scoring.__path__.append(FOLDER)  # as if its file stood in scoring/

from tests.method_cases import METHOD_CASES, MethodCase
from tests.strategies import Shape, random_layer
from vllm_kvselect.choice import retain
from vllm_kvselect.cli import app
from vllm_kvselect.config import KEYS, METHOD_NAMES, ConfigError, EvictionConfig
from vllm_kvselect.engine.frontend.options import add_cli_args
from vllm_kvselect.registry import KNOWN_METHODS, not_served
from vllm_kvselect.request import request_config

# Names in all scopes and with norms.
names = ["late", "late-perturb", "ada-late", "ada-late-perturb", "layer-late", "layer-late-perturb"]
assert [name for name in KNOWN_METHODS if "late" in name] == names
assert [name for name in METHOD_NAMES if "late" in name] == ["late", "ada-late"]
assert {case.method for case in METHOD_CASES} >= {*names}
assert KNOWN_METHODS["layer-late-perturb"].needs == {"output projection"}
assert "'late' comes nearest" in not_served("late-perturb"), not_served("late-perturb")
# The configuration, flat, and a request.
assert "slope" in KEYS
config = EvictionConfig.parse({"method": "late", "slope": -1.0, "allow_override": ["method"]})
assert request_config(config, {"kv_eviction": "ada-late"}).slope == -1.0
for values, said in (
    ({"method": "late", "decode_budget": 512}, "this test says so; set it to 0"),
    ({"slop": 1.0}, "did you mean 'slope'?"),
    ({"method": "ada-lat"}, "did you mean 'ada-late'?"),
):
    try:
        EvictionConfig.parse(values)
        raise SystemExit(f"{values} is accepted")
    except ConfigError as error:
        assert said in str(error), error
# The choice: the latest entries, or with the other sign the first ones.
shape = Shape(2, 1, 8, 4, 1, 41, 3)
layer = random_layer(shape, 0)
for name in names:
    case = MethodCase(name)
    retained = retain([case.inputs(shape, layer)], 3, 4, case.config(window=1)).retained
    assert len(retained) == 2 * 12, name
case = MethodCase("late", {"slope": -1.0})
first = retain([case.inputs(shape, layer)], 3, 4, case.config(window=1)).retained
assert (first % shape.num_tokens).tolist() == [*range(12)] * 2
# The command lines.
parser = argparse.ArgumentParser()
add_cli_args(parser)
assert parser.parse_args(["--kv-eviction", "ada-late"]).kv_eviction_method == "ada-late"
assert parser.parse_args(["--kv-eviction-slope", "2"]).kv_eviction_slope == 2.0
listed = CliRunner().invoke(app, ["methods"]).stdout
assert "ada-late" in listed and "later tokens" in listed
print("known")
"""


def test_a_new_scorer_is_known_everywhere_by_its_file_and_one_entry(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(NEW_FILE, encoding="utf-8")
    script = f"FOLDER = {str(tmp_path)!r}\n{NEW_ENTRY}\n{PROBED}"
    assert python("-c", script).stdout == "known\n"
