"""What is loaded at run time; what may be imported at all, pyproject.toml says."""

import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import vllm_kvselect
from tests.own_process import python

PACKAGE = Path(vllm_kvselect.__file__).parent
NAME = "vllm_kvselect"
WITHOUT_TORCH = (
    "",
    "cli",
    "config",
    "doctor",
    "plugin",
    "registry",
    "request",
    "planning.plan",
    "tiny_model",
    "top",
)
"""What is used where nothing heavy is installed, or where nobody would wait for it."""


def modules() -> list[str]:
    """Every module of the package by its name below the package, '' for the package itself."""
    files = [
        path for path in sorted(PACKAGE.rglob("*.py")) if (path.parent / "__init__.py").exists()
    ]
    paths = [path.relative_to(PACKAGE).with_suffix("") for path in files]
    return [".".join(part for part in path.parts if part != "__init__") for path in paths]


def loaded_by(*names: str) -> set[str]:
    """Modules that are loaded once some of ours are imported, in a fresh interpreter."""
    full_names = [".".join(filter(None, (NAME, name))) for name in names]
    imports = "; ".join(f"import {name}" for name in full_names)
    code = f"{imports}; import sys; print(*sys.modules)"
    result = python("-c", code, cwd=PACKAGE.parent, timeout=120)
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


@pytest.mark.parametrize("module", ["choice", "kernels.cpu"])
def test_triton_is_loaded_by_its_kernels_alone(module: str) -> None:
    assert "triton" not in loaded_by(module)


def test_the_entry_point_imports_the_engine_only_when_called() -> None:
    """Else vLLM would log a failure and serve without the plugin."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    (value,) = project["entry-points"]["vllm.general_plugins"].values()
    module, function = value.split(":")
    assert callable(getattr(import_module(module), function))
    assert f"{NAME}.engine" not in loaded_by(module.removeprefix(f"{NAME}."))
