"""Tables and pictures, from predictions to files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from tests.evaluation.test_scores import EASY, HARD, example, predicted
from vllm_kvselect.evaluation import report
from vllm_kvselect.evaluation.predictions import Prediction
from vllm_kvselect.evaluation.scores import rows, scored
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.registry import METHODS

EXAMPLES = EASY + HARD
RECORD: dict[str, Any] = {
    "command": "vllm-kvselect evaluate",
    "model": "small",
    "versions": {"torch": "2", "transformers": "5"},
    "machine": {"processor": "fast", "threads": 2},
}
LONGER = [example("easy", index, 4096) for index in range(2)]


@pytest.fixture
def predictions() -> list[Prediction]:
    return [
        *predicted(EXAMPLES, "11111000", nll=0.5, accuracy=0.75),
        *predicted(EXAMPLES, "11010010", "snapkv", 0.5, nll=0.75, accuracy=0.5),
        *predicted(EXAMPLES, "11111000", scenario="context-only"),
        *predicted(EXAMPLES, "01010000", "kvzip", 0.5, "context-only", "kvpress"),
        *predicted(LONGER, "11"),
    ]


def test_tables_say_what_counts_and_what_does_not(
    predictions: list[Prediction], tmp_path: Path
) -> None:
    config = EvaluationConfig(suite="ruler", out=tmp_path, methods=("snapkv",), budgets=(0.5,))
    report.write(scored(EXAMPLES + LONGER, predictions), config, 7.0)
    page = (tmp_path / "table.md").read_text(encoding="utf-8")
    command = f"vllm-kvselect evaluate ruler --methods snapkv --budgets 0.5 --out {tmp_path}"
    assert f"    {command}\n" in page
    tables = page.split("\n**")[1:]
    assert [each.split("**")[0] for each in tables] == [
        "regular, 2048 tokens",
        "regular, 4096 tokens",
        "context-only, 2048 tokens",
    ]
    columns = "easy (n = 4) | hard (n = 4) | mean (n = 4) | minus full"
    assert f"| method | budget | kept | {columns} | NLL | minus full | likeliest |\n" in tables[0]
    assert "| full cache |  | 100.0% | 100 | (25) | 100.0 |  | 0.500 |  | 75% |\n" in tables[0]
    assert (
        "| snapkv | 0.5 | 25.0% | 75 | (25) | 75.0 | -25.0 [-75.0, +0.0] "
        "| 0.750 | +0.250 [+0.250, +0.250] | 50% |\n"
    ) in tables[0]
    assert "| kvzip (kvpress) | 0.5 | 25.0% | 50 | (0) | 50.0 | -50.0 [" in tables[2]
    assert "NLL |" not in tables[2]


def test_several_budgets_have_an_overview(predictions: list[Prediction]) -> None:
    """A method that has no such budget leaves its place empty, the full cache fills all."""
    more = predicted(EXAMPLES, "11110000", "random", 0.25, nll=1.0)
    found = rows(scored(EXAMPLES, [*predictions, *more]))
    page = report.markdown(found, RECORD)
    lines = [
        "**regular, 2048 tokens: mean score, NLL**",
        "",
        "| method | 0.5 | 0.25 |",
        "| --- | --- | --- |",
        "| full cache | 100, 0.50 | 100, 0.50 |",
        "| snapkv | 75, 0.75 |  |",
        "| random |  | 100, 1.00 |",
    ]
    assert "\n".join(lines) in page
    assert page.index(lines[0]) < page.index("**regular, 2048 tokens**")


def test_record_has_the_whole_configuration(predictions: list[Prediction], tmp_path: Path) -> None:
    values = {"methods": ("snapkv",), "eviction": {"window": 8}}
    config = EvaluationConfig(suite="ruler", out=tmp_path, **values)
    report.write(scored(EXAMPLES, predictions), config, 7.0)
    record = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    assert record["config"] == config.model_dump(mode="json")
    assert {each["window"] for each in record["evictions"]} == {8}
    assert {"vllm_kvselect", "torch", "transformers", "python"} <= set(record["versions"])
    snapkv = next(row for row in record["rows"] if row["method"] == "snapkv")
    assert snapkv["score"] == {"value": 0.75, "difference": -0.25, "interval": [-0.75, 0.0]}
    assert snapkv["num_examples"] == {"easy": 4, "hard": 4}


def test_command_names_all_methods_as_all() -> None:
    config = EvaluationConfig(suite="ruler", methods=tuple(METHODS), lengths=(2048, 4096))
    assert report.command(config) == (
        "vllm-kvselect evaluate ruler --lengths 2048,4096 --methods all"
    )


def test_tables_are_printed(
    predictions: list[Prediction], capsys: pytest.CaptureFixture[str]
) -> None:
    report.show(scored(EXAMPLES, predictions))
    lines = capsys.readouterr().out.splitlines()
    assert any("snapkv" in line and "-25.0 [-75.0, +0.0]" in line for line in lines)


def test_pictures_show_depths_and_budgets(tmp_path: Path) -> None:
    examples = [
        replace(example("needle", index, length), depth=index / 4)
        for length in (1024, 2048)
        for index in range(5)
    ]
    predictions = [
        *predicted(examples, "1" * 10),
        *predicted(examples, "10" * 5, "snapkv", 0.5),
        *predicted(examples, "00001" * 2, "snapkv", 0.25),
    ]
    config = EvaluationConfig(suite="needles", out=tmp_path, methods=("snapkv",))
    paths = report.write(scored(examples, predictions), config, 1.0)
    names = {path.name for path in paths if path.suffix == ".png"}
    assert names == {
        "depths-regular-none.png", "depths-regular-snapkv.png", "budgets-regular.png",
    }  # fmt: skip
    drawn = {name: imread(tmp_path / name)[..., :3] for name in names}
    for name, pixels in drawn.items():
        assert (pixels < 0.9).any(axis=-1).mean() > 0.01, f"nothing is drawn in {name}"
    reds = {
        name: ((pixels[..., 0] > 0.6) & (pixels[..., 1] < 0.2)).sum()
        for name, pixels in drawn.items()
    }
    assert reds["depths-regular-snapkv.png"] > 10 * reds["depths-regular-none.png"]
