"""What the documentation names exists; `make docs` checks links and anchors between its pages."""

import argparse
import re
import tomllib
from pathlib import Path

import pytest

from vllm_kvselect.config import METHOD_NAMES, EvictionConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("benchmarks", "configs", "docs", "packaging", "patches", "tests", "vllm_kvselect")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.*"))]
FILE = re.compile(r"`(?:python )?((?:\w+/)*\w+\.(?:cpp|json|md|py|toml|yaml))\b")
OPTION = re.compile(r"--kv-eviction[a-z-]*")


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def exists(name: str) -> bool:
    """Whether a file has this name, as people shorten it: any folders above may be left out."""
    return any(path.as_posix().endswith(f"/{name}") for path in FILES)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_that_a_page_names_exist(page: Path) -> None:
    names = set(FILE.findall(page.read_text(encoding="utf-8")))
    assert not sorted(name for name in names if not exists(name))


def test_commands_in_pages_run_scripts_that_exist() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    scripts = set(re.findall(r"python ((?:\w+/)+\w+\.py)", text))
    assert scripts
    assert not sorted(name for name in scripts if not (ROOT / name).is_file())


def test_pages_that_code_names_exist() -> None:
    named = {
        name
        for path in FILES
        if path.suffix in {".md", ".py", ".toml", ".yaml"}
        for name in re.findall(r"\bdocs/\w+\.md", path.read_text(encoding="utf-8"))
    }
    assert named
    assert not sorted(name for name in named if not (ROOT / name).is_file())


def test_every_method_has_a_row() -> None:
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    rows = "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    assert {name for name in METHOD_NAMES if f"`{name}`" not in rows} == {"none"}


def test_readme_has_every_option_with_its_default() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `--kv-eviction")]
    shown = {row.split("`")[1].split()[0]: row.split("|")[-2].strip() for row in rows}
    defaults = EvictionConfig()
    assert shown["--kv-eviction-budget"] == str(defaults.budget)
    assert shown["--kv-eviction-window"] == str(defaults.window)
    assert shown["--kv-eviction-alpha"] == str(defaults.alpha)
    assert set(shown) == known_options()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_options_that_a_page_names_are_accepted(page: Path) -> None:
    named = set(OPTION.findall(page.read_text(encoding="utf-8")))
    assert named <= known_options()


def test_extras_that_pages_name_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"pip install '(?:\.|vllm-kvselect)\[([a-z-]+)\]'", text))
    assert named
    assert named <= set(project["optional-dependencies"])


def known_options() -> set[str]:
    """Options that vLLM's command line accepts from us."""
    from vllm_kvselect.engine.frontend.arguments import add_cli_args

    parser = argparse.ArgumentParser(add_help=False)
    add_cli_args(parser)
    return set(OPTION.findall(parser.format_help()))
