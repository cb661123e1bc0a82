"""`vllm-kvselect evaluate` from the command line to its files, off the engine."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vllm_kvselect.cli import app
from vllm_kvselect.evaluation import off_engine
from vllm_kvselect.evaluation.predictions import read, write
from vllm_kvselect.evaluation.run import SUITES

FILES = {"run.json", "examples.jsonl", "predictions.jsonl", "scores.json", "table.md"}


def run(*options: str) -> Result:
    return CliRunner().invoke(app, ("evaluate", *options))


def needles(folder: Path, out: Path, *options: str) -> Result:
    return run(
        *("needles", "--model", str(folder), "--dtype", "float32", "--lengths", "300,400"),
        *("--num-examples", "2", "--methods", "snapkv", "--budgets", "0.5,0.25"),
        *("--out", str(out), *options),
    )


def test_an_evaluation_leaves_predictions_scores_table_and_pictures(
    llama_folder: Path, tmp_path: Path
) -> None:
    result = needles(llama_folder, tmp_path, "--scenarios", "regular,context-only")
    assert result.exit_code == 0, result.output
    pictures = {
        f"depths-{scenario}-{method}.png"
        for scenario in ("regular", "context-only")
        for method in ("none", "snapkv")
    }
    assert {path.name for path in tmp_path.iterdir()} == FILES | pictures
    assert len(list(read(tmp_path / "predictions.jsonl"))) == 2 * 2 * 2 * 3
    record = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    assert record["config"]["lengths"] == [300, 400]
    assert len(record["rows"]) == 2 * 2 * 3
    assert record["command"] in (tmp_path / "table.md").read_text(encoding="utf-8")
    assert str(tmp_path / "table.md") in result.stdout


def test_a_run_is_taken_up_again(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert needles(llama_folder, tmp_path).exit_code == 0
    path = tmp_path / "predictions.jsonl"
    before = list(read(path))
    path.unlink()
    write([each for each in before if each.example != "needle/400/1"], path)
    assert needles(llama_folder, tmp_path).exit_code == 0
    again = list(read(path))
    assert len(again) == len(before)
    assert sorted(map(str, again)) == sorted(map(str, before))

    monkeypatch.setattr(off_engine, "capture", None)  # nothing is left to run
    assert needles(llama_folder, tmp_path).exit_code == 0


def test_a_report_is_of_what_was_asked_for(llama_folder: Path, tmp_path: Path) -> None:
    assert needles(llama_folder, tmp_path).exit_code == 0
    assert needles(llama_folder, tmp_path, "--budgets", "0.25").exit_code == 0
    record = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    assert {row["budget"] for row in record["rows"]} == {None, 0.25}
    assert len(list(read(tmp_path / "predictions.jsonl"))) == 2 * 2 * 3


def test_another_evaluation_is_not_mixed_in(llama_folder: Path, tmp_path: Path) -> None:
    assert needles(llama_folder, tmp_path).exit_code == 0
    for other in (("--seed", "1"), ("--set", "window=8"), ("--lengths", "400")):
        result = needles(llama_folder, tmp_path, *other)
        assert result.exit_code == 2
        assert "is of another evaluation" in result.output


def test_predictions_of_others_stand_in_the_same_table(llama_folder: Path, tmp_path: Path) -> None:
    assert needles(llama_folder, tmp_path / "ours").exit_code == 0
    ours = list(read(tmp_path / "ours" / "predictions.jsonl"))
    peer = tmp_path / "peer.jsonl"
    write(
        [
            type(each)(**asdict(each) | {"method": "kvzip", "through": "kvpress"})
            for each in ours
            if each.method == "snapkv"
        ],
        peer,
    )
    result = needles(llama_folder, tmp_path / "ours", "--also", str(peer))
    assert result.exit_code == 0, result.output
    table = (tmp_path / "ours" / "table.md").read_text(encoding="utf-8")
    assert table.count("| kvzip (kvpress) | 0.5 |") == 2
    result = needles(llama_folder, tmp_path / "ours", "--also", str(tmp_path / "nowhere.jsonl"))
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--methods", "snapkw"), "snapkw"),
        (("--budgets", "many"), "many"),
        (("--scenarios", "both"), "both"),
        (("--lengths", "300.5"), "300.5"),
        (("--model", "no/such/model"), "model"),
    ],
)
def test_mistakes_are_told_in_one_line(
    options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    result = run("needles", *options, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_unknown_suites_are_refused() -> None:
    result = run("glue")
    assert result.exit_code == 2
    assert all(name in result.output for name in SUITES)
