"""Data flows one way and imports follow it; only `engine` knows vLLM."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_kvselect

PACKAGE = Path(vllm_kvselect.__file__).parent
NAME = "vllm_kvselect"

LEFT_TO_RIGHT = (
    ("machine",),
    ("config",),
    ("request",),
    ("retention",),
    ("scoring",),
    ("allocation",),
    ("selection",),
    ("pruning",),
    ("ranking",),
    ("compaction",),
    ("page_table",),
    ("kernels",),
    ("methods",),
    ("engine",),
)
"""Later parts may import earlier ones, never the other way round."""

APART = ("cli", "tiny_model", "top", "evaluation")
"""Parts that use the others but that nothing among LEFT_TO_RIGHT may import."""

USES_VLLM_LIKE_ANYONE = ("evaluation",)
"""May import vLLM's public names (`from vllm import LLM`), as any user of vLLM does."""

WITHOUT_TORCH = ("config", "request", "retention")
WITH_TORCH = (
    "scoring.at_random",
    "scoring.defensivekv",
    "scoring.h2o",
    "scoring.snapkv",
    "scoring.streaming_llm",
    "scoring.thetakv",
    "scoring.value_norms",
    "allocation",
    "selection",
    "ranking",
    "compaction",
    "page_table",
    "methods",
)


def modules() -> dict[str, Path]:
    """Every module of the package by its name below the package, '' for the package itself."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(path: Path, module: str) -> set[str]:
    """Absolute names that a file imports anywhere, `from a import b` as `a.b`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {module}"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part_of(module: str) -> str:
    """First component below the package: 'scoring' of 'scoring.snapkv'."""
    return module.split(".")[0]


def own_parts(path: Path, module: str) -> set[str]:
    """Parts of this package that a file imports; names of the package itself, such as
    `__version__`, are none."""
    names = {name.split(".", 2)[1] for name in imports(path, module) if name.startswith(f"{NAME}.")}
    return names & {part_of(other) for other in modules() if other}


def run_fresh(code: str) -> str:
    """Runs code in a fresh interpreter and returns what it prints."""
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=PACKAGE.parent, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def loaded_by(module: str) -> set[str]:
    """Modules that are loaded once one of ours is imported into a fresh interpreter."""
    return set(run_fresh(f"import {module}, sys\nprint(*sys.modules)").split())


def loaded_parts(loaded: set[str]) -> set[str]:
    return {
        part_of(name.removeprefix(f"{NAME}.")) for name in loaded if name.startswith(f"{NAME}.")
    }


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_config_request_and_retention_load_neither_torch_nor_vllm(module: str) -> None:
    loaded = loaded_by(f"{NAME}.{module}")
    assert f"{NAME}.{module}" in loaded
    assert not {"torch", "vllm", "numpy"} & loaded
    assert loaded_parts(loaded) <= set(WITHOUT_TORCH)


def test_pure_modules_never_load_vllm_nor_what_comes_after_them() -> None:
    # Torch takes seconds to load: once, before a process is forked for each module. vLLM is barred,
    # so that an import under `try` shows even where vLLM is not installed.
    loaded = run_fresh(f"""
import importlib, os, sys, torch
class Bar:
    def find_spec(self, name, *_):
        if name.split('.')[0] == 'vllm': sys.exit(f'{{module}} imports vllm')
sys.meta_path.insert(0, Bar())
for module in {WITH_TORCH}:
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        if status: sys.exit(1)
    else:
        importlib.import_module(f'{NAME}.{{module}}')
        print(module, *sys.modules, flush=True)
        sys.exit()
""")
    lines = [line.split() for line in loaded.splitlines()]
    assert tuple(module for module, *_ in lines) == WITH_TORCH
    order = [part for group in LEFT_TO_RIGHT for part in group]
    for module, *names in lines:
        assert "vllm" not in names
        assert f"{NAME}.{module}" in names
        assert loaded_parts(set(names)) <= set(order[: order.index(part_of(module)) + 1]), module


@pytest.mark.parametrize("module", ["", "cli"])
def test_the_package_and_its_command_line_start_without_torch(module: str) -> None:
    loaded = loaded_by(".".join(filter(None, (NAME, module))))
    assert not {"torch", "vllm", "transformers", "matplotlib"} & loaded


@pytest.mark.parametrize("module", ["methods", "kernels.cpu"])
def test_triton_is_loaded_by_its_kernels_alone(module: str) -> None:
    assert "triton" not in loaded_by(f"{NAME}.{module}")


@pytest.mark.parametrize("module", modules())
def test_only_the_engine_imports_vllm(module: str) -> None:
    if part_of(module) == "engine":
        return
    names = {name for name in imports(modules()[module], module) if name.split(".")[0] == "vllm"}
    if part_of(module) in USES_VLLM_LIKE_ANYONE:
        names -= {"vllm.LLM", "vllm.SamplingParams"}
    assert not names


@pytest.mark.parametrize("module", modules())
def test_imports_go_from_right_to_left(module: str) -> None:
    order = [part for group in LEFT_TO_RIGHT for part in group]
    imported = own_parts(modules()[module], module)
    part = part_of(module)
    if part in order:
        assert imported <= set(order[: order.index(part) + 1])
    elif module == "":
        assert imported <= {"engine"}  # the entry point of the plugin, nothing else
    else:
        assert part in APART, f"say in LEFT_TO_RIGHT or APART where {part!r} belongs"
        assert "engine" not in imported


def test_the_entry_point_imports_the_engine_only_when_called() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    assert not [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]


def test_the_parts_are_all_there() -> None:
    """A renamed part would otherwise leave its rule without a subject."""
    present = {part_of(module) for module in modules()}
    assert {part for group in LEFT_TO_RIGHT for part in group} <= present
    assert set(WITHOUT_TORCH) | set(WITH_TORCH) <= set(modules())
