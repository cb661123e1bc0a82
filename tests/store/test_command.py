"""`vllm-kvselect contexts`: lists, verifies, removes."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.store.contexts import context, place_of
from vllm_kvselect.cli import app
from vllm_kvselect.store.folder import Folder


def run(*arguments: object) -> Result:
    given = ["contexts", *map(str, arguments)]
    return CliRunner().invoke(app, given, env={"COLUMNS": "200"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stored = Folder(tmp_path)
    for number in (0x1A << 248, 0x2B << 248):
        stored.write(context(number))
    damaged = tmp_path / place_of(0x2B << 248).file
    damaged.write_bytes(damaged.read_bytes()[:-3])
    (tmp_path / "notes.txt").touch()
    return tmp_path


def names(path: Path) -> list[str]:
    return sorted(entry.place.name[:2] for entry in Folder(path).entries())


def test_lists_what_files_say_they_are(folder: Path) -> None:
    result = run(folder)
    assert result.exit_code == 0
    for word in ("1a0000000000", "2b0000000000", "layer-keydiff", "0 of 1", "2 files"):
        assert word in result.stdout
    assert "notes" not in result.stdout


def test_verifies_all_of_every_file(folder: Path) -> None:
    result = run(folder, "--verify")
    assert result.exit_code == 1
    assert "verified" in result.stdout
    assert "no whole safetensors file" in result.stdout
    assert names(folder) == ["1a", "2b"]


def test_removes_what_is_damaged_named_or_there(folder: Path) -> None:
    result = run(folder, "--remove-damaged", "--verify")
    assert (result.exit_code, names(folder)) == (0, ["1a"])
    assert "1 files removed" in result.stdout
    assert run(folder, "--remove", "2").exit_code == 0
    assert names(folder) == ["1a"]
    run(folder, "--remove", "1a0")
    assert names(folder) == []
    Folder(folder).write(context(3))
    run(folder, "--remove-all")
    assert names(folder) == []
    assert (folder / "notes.txt").exists()


def test_a_missing_folder_is_said_in_one_line(tmp_path: Path) -> None:
    result = run(tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "error: there is no folder" in result.output
