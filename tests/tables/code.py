"""The package as text: its files, their syntax trees, and which of them a server loads."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm_kvselect"


@cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def first_clause(path: Path) -> str:
    """What a module says of itself first, in four words or more if it says so many in a line."""
    line = (ast.get_docstring(parsed(path)) or "").partition("\n")[0].rstrip(".")
    if own_name := re.match(r"(`[^`]+`|\w+): ", line):
        line = line[own_name.end() :]
    clauses = re.split(r"(; |: |\. |, )", line)
    text = clauses[0]
    for separator, clause in zip(clauses[1::2], clauses[2::2], strict=True):
        if len(text.split()) < 4:
            text += separator + clause
    is_ours = own_name and not text.startswith("vLLM")
    return text[:1].upper() + text[1:] if is_ours else text


@cache
def served() -> tuple[Path, ...]:
    """Files that a server loads: those of the engine and what they import; the doctor's not."""
    waiting = [path for path in (PACKAGE / "engine").rglob("*.py") if path.stem != "doctor"]
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imported(path)
    return tuple(sorted(found))


def _imported(path: Path) -> list[Path]:
    """Files of the package that a file imports, or names in a text: workers, parts of methods."""
    names = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names += re.findall(r"^vllm_kvselect\.[\w.]+$", node.value)
            names += [
                f"vllm_kvselect.scoring.{part}" for part in re.findall(r"^(\w+):\w", node.value)
            ]
    return [found for name in names if (found := file_of(name))]


def file_of(name: str) -> Path | None:
    """The file of a module of the package, or None."""
    place = ROOT.joinpath(*name.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((path for path in files if PACKAGE in path.parents and path.is_file()), None)


def parts(folder: Path) -> list[Path]:
    """Modules and folders of a folder, those first that may import the others."""
    found = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    found += [path.parent for path in folder.glob("*/__init__.py")]
    order = _layers(".".join(folder.relative_to(ROOT).parts))
    return sorted(found, key=lambda path: (order.get(path.stem, len(order)), path.name))


@cache
def _layers(container: str) -> dict[str, int]:
    """The place of each part of a package in the contracts on imports."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for contract in tomllib.loads(text)["tool"]["importlinter"]["contracts"]:
        if container in contract.get("containers", ()):
            rows = [re.split(r"\s*[|:]\s*", row) for row in contract["layers"]]
            return {name.strip("()"): index for index, names in enumerate(rows) for name in names}
    return {}
