from dataclasses import replace
from pathlib import Path

import pytest

from vllm_kvselect.evaluation.predictions import Prediction, Setting, read, write
from vllm_kvselect.offline.errors import EvaluationError

PREDICTION = Prediction(
    example="niah_single_1/2048/0",
    scenario="context-only",
    method="snapkv",
    budget=1,
    through="model",
    text="eins\nzwei \u2028 drei",
    num_tokens=5,
    retained=0.25,
    nll=0.5,
)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    written = [PREDICTION, replace(PREDICTION, budget=1.0), replace(PREDICTION, budget=None)]
    write(written[:1], path)
    write(written[1:], path)
    found = list(read(path))
    assert found == written
    assert [type(each.budget) for each in found] == [int, float, type(None)]


def test_no_file_holds_no_predictions(tmp_path: Path) -> None:
    assert list(read(tmp_path / "none.jsonl")) == []


@pytest.mark.parametrize("line", ["{", "{}", '{"example": "a", "colour": "red"}', "7"])
def test_what_is_no_prediction_is_named_by_its_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    write([PREDICTION], path)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(EvaluationError, match=r"predictions.jsonl, line 2: "):
        list(read(path))


def test_setting_is_what_is_averaged() -> None:
    assert PREDICTION.setting == Setting("context-only", "snapkv", 1, "model")
    assert replace(PREDICTION, example="another", text="").setting == PREDICTION.setting
