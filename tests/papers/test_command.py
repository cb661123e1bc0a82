"""Every analysis from the command line to its files, on a random model and real code."""

import json
import shlex
from pathlib import Path

import pytest
import typer
from analyze import main
from matplotlib.image import imread
from papers import bound
from papers.quantities import theta
from papers.settings import ANALYSIS_NAMES, DEFAULTS, AnalysisName
from typer.testing import CliRunner, Result

from tests.offline.conftest import NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS
from tests.own_process import python
from vllm_kvselect.config import ConfigError
from vllm_kvselect.offline.errors import EvaluationError

ROOT = Path(__file__).parents[2]
FIGURES = {
    "perturbation": {"heads", "layers", "shares"},
    "assumption": {"heads", "budgets"},
    "bound": {"heads", "budgets"},
    "alpha": {"heads", "alphas"},
    "metric": {"heads"},
    "norms": set(),
    "sparse-prefill": set(),
}


def run(analysis: str, *options: str) -> Result:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, (analysis, *options))


def small(folder: Path, out: Path, *options: str) -> tuple[str, ...]:
    return (
        *("--model", str(folder), "--texts", "stdlib", "--length", "300", "--num-texts", "2"),
        *("--out", str(out), *options),
    )


@pytest.mark.parametrize("analysis", ANALYSIS_NAMES)
def test_every_analysis_leaves_record_table_and_figures(
    analysis: AnalysisName, llama_folder: Path, tmp_path: Path
) -> None:
    result = run(analysis, *small(llama_folder, tmp_path, "--budgets", "0.2,0.4"))
    assert result.exit_code == 0, result.output
    names = {f"{analysis}-{figure}.png" for figure in FIGURES[analysis]}
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{analysis}.json",
        f"{analysis}.md",
        *names,
    }
    for name in names:
        pixels = imread(tmp_path / name)[..., :3]
        assert min(pixels.shape[:2]) > 200
        assert (pixels < 0.9).any(axis=-1).mean() > 0.01, "nothing is drawn"
        assert str(tmp_path / name) in result.stdout

    record = json.loads((tmp_path / f"{analysis}.json").read_text(encoding="utf-8"))
    assert record["config"]["methods"] == list(DEFAULTS[analysis].methods)
    assert record["config"]["budgets"] == [0.2, 0.4]
    assert len(record["evictions"]) == 2 * len(DEFAULTS[analysis].methods)
    assert record["evictions"][0]["window"] == 32
    assert record["model"]["num_layers"] == NUM_LAYERS
    assert record["results"]


def test_command_of_a_record_makes_the_same_record(llama_folder: Path, tmp_path: Path) -> None:
    options = ("--methods", "adakv", "--set", "window=16", "--set", "eps=1e-3", "--seed", "3")
    first = run("metric", *small(llama_folder, tmp_path, "--budgets", "0.2,100", *options))
    assert first.exit_code == 0
    record = json.loads((tmp_path / "metric.json").read_text(encoding="utf-8"))
    (tmp_path / "metric.json").unlink()
    assert run(*shlex.split(record["command"])[2:]).exit_code == 0
    again = json.loads((tmp_path / "metric.json").read_text(encoding="utf-8"))
    assert {**again, "seconds": 0} == {**record, "seconds": 0}


def test_perturbation_of_the_whole_prompt_is_nothing(llama_folder: Path, tmp_path: Path) -> None:
    options = small(llama_folder, tmp_path, "--budgets", "1.0", "--methods", "streaming-llm")
    assert run("perturbation", *options).exit_code == 0
    record = json.loads((tmp_path / "perturbation.json").read_text(encoding="utf-8"))
    for setting in record["results"]["settings"]:
        assert len(setting["heads"]) == NUM_LAYERS
        assert all(len(row) == NUM_HEADS for row in setting["heads"])
        assert max(map(max, setting["heads"])) < 1e-3
        assert max(setting["hidden"]) == 0.0


def test_settings_of_a_method_reach_it(llama_folder: Path, tmp_path: Path) -> None:
    options = ("--methods", "snapkv,snapkv-perturb", "--budgets", "0.3", "--set", "alpha=1.0")
    assert run("perturbation", *small(llama_folder, tmp_path, *options)).exit_code == 0
    record = json.loads((tmp_path / "perturbation.json").read_text(encoding="utf-8"))
    assert {each["alpha"] for each in record["evictions"]} == {1.0}
    # With alpha 1 the second stage retains nothing, so both methods are the same.
    one, two, *_ = record["results"]["settings"]
    assert one["heads"] == two["heads"]


@pytest.mark.parametrize("analysis", ["perturbation", "metric"])
def test_one_text_gives_no_interval(
    analysis: AnalysisName, llama_folder: Path, tmp_path: Path
) -> None:
    options = ("--budgets", "0.3", "--scenarios", "regular", "--num-texts", "1")
    assert run(analysis, *small(llama_folder, tmp_path, *options)).exit_code == 0
    rows = [
        line
        for line in (tmp_path / f"{analysis}.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| regular")
    ]
    assert rows
    assert not [row for row in rows if "±" in row or "% to" in row]


def test_heads_that_fail_the_assumption_are_named(llama_folder: Path, tmp_path: Path) -> None:
    options = ("--methods", "snapkv-perturb", "--budgets", "0.2,0.9")
    assert run("assumption", *small(llama_folder, tmp_path, *options)).exit_code == 0
    record = json.loads((tmp_path / "assumption.json").read_text(encoding="utf-8"))
    num_failing = 0
    for setting in record["results"]["settings"]:
        masses = {
            (i, j): mass for i, row in enumerate(setting["mass"]) for j, mass in enumerate(row)
        }
        failing = {(layer, head) for layer, head in setting["failing_layer_and_head"]}
        assert failing == {place for place, mass in masses.items() if mass <= 0.5}
        num_failing += len(failing)
        alone = [mass for row in setting["mass_of_stage_1_alone"] for mass in row]
        assert all(one < both for one, both in zip(alone, masses.values(), strict=True))
    assert num_failing > 0


def test_bound_that_does_not_hold_is_an_error(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bound, "theta", lambda *arguments: 0.1 * theta(*arguments))
    result = run("bound", *small(llama_folder, tmp_path, "--budgets", "0.2"))
    assert isinstance(result.exception, EvaluationError)
    assert str(result.exception).startswith("a perturbation exceeds theta")


def test_alpha_agrees_with_perturbation(llama_folder: Path, tmp_path: Path) -> None:
    options = ("--scenarios", "regular", "--budgets", "0.4")
    methods = ("--methods", "snapkv-perturb")
    assert run("alpha", *small(llama_folder, tmp_path, *options, *methods)).exit_code == 0
    record = json.loads((tmp_path / "alpha.json").read_text(encoding="utf-8"))
    (setting,) = record["results"]["settings"]
    assert [len(row) for row in setting["best_alpha_of_head"]] == [NUM_KV_HEADS] * NUM_LAYERS
    assert setting["relative"][-1] == 1.0

    methods = ("--methods", "snapkv,snapkv-perturb", "--set", "alpha=0.3")
    assert run("perturbation", *small(llama_folder, tmp_path, *options, *methods)).exit_code == 0
    record = json.loads((tmp_path / "perturbation.json").read_text(encoding="utf-8"))
    (share,) = record["results"]["shares"]
    assert share["ratio"] == pytest.approx(setting["relative"][3], rel=1e-4)
    assert share["ratio"] != pytest.approx(setting["relative"][0], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--methods", "snapkv,magic"), "method = 'magic' is not accepted"),
        (("--budgets", "0.2,1.5"), "budget = 1.5 is not accepted"),
        (("--set", "alpha=2"), "alpha = 2 is not accepted"),
        (("--set", "speed=1"), "unknown key 'speed'"),
        (("--task", "poem"), "task = 'poem'"),
        (("--scenarios", "irregular"), "scenarios.0 = 'irregular'"),
        (("--model", "/nowhere"), "cannot load nowhere with transformers"),
    ],
)
def test_a_refused_value_is_told_in_one_line(options: tuple[str, str], named: str) -> None:
    result = run("perturbation", *options)
    assert isinstance(result.exception, ConfigError | EvaluationError)
    assert str(result.exception).startswith(named)
    assert "\n" not in str(result.exception)


def test_the_script_tells_it_on_stderr() -> None:
    result = python("benchmarks/analyze.py", "bound", "--set", "speed=1", cwd=ROOT, fails=True)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: unknown key 'speed'")
    assert result.stderr.count("\n") == 1
