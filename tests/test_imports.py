"""What is loaded at run time; what may be imported at all, pyproject.toml says."""

import subprocess
import sys
from pathlib import Path

import pytest

import vllm_kvselect

PACKAGE = Path(vllm_kvselect.__file__).parent
NAME = "vllm_kvselect"
WITHOUT_TORCH = (
    "",
    "cli",
    "config",
    "doctor",
    "methods.registry",
    "request",
    "retention",
    "tiny_model",
    "top",
)
"""What is used where nothing heavy is installed, or where nobody would wait for it."""


def modules() -> list[str]:
    """Every module of the package by its name below the package, '' for the package itself."""
    paths = [path.relative_to(PACKAGE).with_suffix("") for path in sorted(PACKAGE.rglob("*.py"))]
    return [".".join(part for part in path.parts if part != "__init__") for path in paths]


def loaded_by(*names: str) -> set[str]:
    """Modules that are loaded once some of ours are imported, in a fresh interpreter."""
    full_names = [".".join(filter(None, (NAME, name))) for name in names]
    imports = "; ".join(f"import {name}" for name in full_names)
    command = [sys.executable, "-c", f"{imports}; import sys; print(*sys.modules)"]
    result = subprocess.run(
        command, cwd=PACKAGE.parent, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert loaded.issuperset(full_names)
    return loaded


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_plain_parts_load_nothing_heavy(module: str) -> None:
    assert not {"matplotlib", "numpy", "torch", "transformers", "vllm"} & loaded_by(module)


def test_nothing_but_the_engine_loads_vllm() -> None:
    beside = [module for module in modules() if not module.startswith("engine")]
    assert len(beside) > 40
    assert "vllm" not in loaded_by(*beside)


@pytest.mark.parametrize("module", ["methods.choice", "kernels.cpu"])
def test_triton_is_loaded_by_its_kernels_alone(module: str) -> None:
    assert "triton" not in loaded_by(module)


def test_the_entry_point_imports_the_engine_only_when_called() -> None:
    assert f"{NAME}.engine" not in loaded_by("")
