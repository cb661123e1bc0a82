"""What a user may type by mistake, for every option of every command: one line, no traceback.

The options come from the parser itself, so that a new one is tried by itself. What is accepted
runs, on a random model and as little text as will do.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import matplotlib.pyplot  # noqa: F401 (it looks for a cache, which tests take away)
import pytest
import typer.main
from typer.testing import CliRunner

from tests.offline.conftest import llama, llama_folder, tokenizer  # noqa: F401 (fixtures)
from vllm_kvselect.cli import app

COMMANDS: dict[str, Any] = vars(typer.main.get_command(app))["commands"]


def evaluate(model: Path, out: Path) -> list[str]:
    """An example of a suite that generates."""
    size = ["--lengths", "256", "--num-examples", "1", "--methods", "knorm", "--budgets", "0.5"]
    return ["needles", "--model", str(model), "--dtype", "float32", *size, "--out", str(out)]


def calibrate(model: Path, out: Path) -> list[str]:
    """A step on a text."""
    size = ["--texts", "pairs", "--tokens", "256", "--length", "256", "--steps", "1"]
    return [str(model), "--dtype", "float32", *size, "--out", str(out / "probe")]


VALID: dict[str, Callable[[Path, Path], list[str]]] = {
    "calibrate": calibrate,
    "contexts": lambda _, out: [str(out)],
    "doctor": lambda *_: [],
    "evaluate": evaluate,
    "fast-dtype": lambda *_: [],
    "methods": lambda *_: [],
    "plan": lambda *_: ["--prompt-len", "1000"],
    "tiny-model": lambda *_: [],
    "top": lambda *_: ["--once", "--url", "http://127.0.0.1:9"],
}
"""A line that is accepted, but for `top`, whose server nobody started."""

TAKES_VALUES = [
    (name, option.name)
    for name, command in COMMANDS.items()
    for option in command.params
    if not getattr(option, "is_flag", False)
]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a network, and without a cache in which the small model might be."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    monkeypatch.chdir(tmp_path)


def mistakes(tmp_path: Path) -> dict[str, str]:
    """What may be typed in place of a value, by what is wrong with it."""
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("no model, no probe, no prediction\n", encoding="utf-8")
    folder.mkdir()
    return {
        "empty": "",
        "text": "much",
        "negative": "-1",
        "zero": "0",
        "huge": str(10**30),
        "more than a float holds": "1e999",
        "no number": "nan",
        "missing": str(tmp_path / "nowhere" / "at" / "all"),
        "a file": str(file),
        "a file in place of a folder": str(file / "below"),
        "a folder": str(folder),
    }


@pytest.mark.parametrize(("name", "option"), TAKES_VALUES)
def test_a_mistake_is_told_in_one_line(
    name: str,
    option: str,
    llama_folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    (parameter,) = [each for each in COMMANDS[name].params if each.name == option]
    for kind, value in mistakes(tmp_path).items():
        line = VALID[name](llama_folder, tmp_path / kind)
        if name == "contexts":
            (tmp_path / kind).mkdir()
        if parameter.param_type_name == "argument":
            line = [value, *line[1:]]
        else:
            line += [parameter.opts[-1], value]
        result = CliRunner().invoke(app, [name, *line])
        told = f"{kind}: {name} {' '.join(line)}\n{result.output}"
        # Anything but an exit would be shown as a traceback.
        assert isinstance(result.exception, SystemExit | None), (told, result.exception)
        assert result.exit_code in (0, 1, 2), told
        if result.exit_code == 2:
            # Before it may stand what was begun, in lines of its own.
            *_, last = result.stderr.splitlines()
            assert last.startswith("error: "), told
