"""What the documentation names exists; `make docs` checks links and anchors between its pages."""

import argparse
import re
import tomllib
from pathlib import Path

import pytest

from tests.tables.contents import MARKED, TABLES, renewed
from vllm_kvselect.config import KEYS
from vllm_kvselect.engine.frontend.options import add_cli_args
from vllm_kvselect.registry import METHODS
from vllm_kvselect.request import REQUEST_KEYS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("benchmarks", "configs", "docs", "packaging", "patches", "tests", "vllm_kvselect")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.*"))]
FILE = re.compile(r"`(?:python )?((?:\w+/)*\w+\.(?:cpp|json|md|py|toml|yaml))\b")
MOST_WORDS = 26_000
OPTION = re.compile(r"--kv-(?:eviction|prefill)[a-z-]*")


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def exists(name: str) -> bool:
    """Whether a file has this name, as people shorten it: any folders above may be left out."""
    return any(path.as_posix().endswith(f"/{name}") for path in FILES)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_that_a_page_names_exist(page: Path) -> None:
    names = set(FILE.findall(page.read_text(encoding="utf-8")))
    assert not sorted(name for name in names if not exists(name))


def test_all_pages_together_stay_short_enough_to_be_read() -> None:
    """What is new replaces what it makes needless: tell a thing once."""
    words = {page_id(page): len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert sum(words.values()) <= MOST_WORDS, words


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


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_tables_are_what_make_tables_makes_of_the_code(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == renewed(page), "run `make tables`"


def test_every_table_stands_on_one_page() -> None:
    named = [name for page in PAGES for _, name, _, _ in MARKED.findall(page.read_text("utf-8"))]
    assert sorted(named) == sorted(TABLES)


def test_every_setting_option_and_key_of_requests_has_one_row() -> None:
    heads = [row.partition(": ")[0] for row in rows("settings")]
    names = [name for head in heads for name in re.findall(r"`([a-z0-9_-]+)`", head)]
    for known in (KEYS, known_options(), REQUEST_KEYS):
        assert [name for name in known if names.count(name) != 1] == []


def test_every_method_has_a_row() -> None:
    heads = [row.partition(": ")[0] for row in rows("methods")]
    listed = [name for head in heads for name in re.findall("`([^`]+)`", head)]
    assert sorted(listed) == sorted(METHODS)


def test_every_metric_that_is_shown_somewhere_has_a_row() -> None:
    listed = {row.split("`")[1] for row in rows("metrics")}
    assert listed
    texts = [ROOT / "docs" / "grafana.json", *PAGES, *(ROOT / "vllm_kvselect").glob("*.py")]
    named = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for path in texts
        for name in re.findall(r"vllm:kv_eviction_\w*[a-z]", path.read_text(encoding="utf-8"))
    }
    assert named <= listed


def test_every_module_of_the_engine_is_listed() -> None:
    listed = set(re.findall(r"\w+", " ".join(rows("modules", "    "))))
    files = (ROOT / "vllm_kvselect" / "engine").rglob("*.py")
    assert {path.stem for path in files if path.name != "__init__.py"} <= listed


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_options_that_a_page_names_are_accepted(page: Path) -> None:
    named = set(OPTION.findall(page.read_text(encoding="utf-8")))
    assert named <= known_options()


def test_extras_that_pages_name_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"pip install '\.\[([a-z-]+)\]'", text))
    assert named
    assert named <= set(project["optional-dependencies"])


def known_options() -> set[str]:
    """Options that vLLM's command line accepts from us."""
    parser = argparse.ArgumentParser(add_help=False)
    add_cli_args(parser)
    return {option for action in parser._actions for option in action.option_strings}


def rows(name: str, start: str = "- ") -> list[str]:
    """Lines of a table that is made from the code."""
    return [line for line in TABLES[name]().splitlines() if line.startswith(start)]
