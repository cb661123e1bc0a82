"""The doctor as people call it, in a process of its own, on installations that lack something."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import vllm

from tests.engine.configurations import written
from tests.engine.test_models import MODELS
from vllm_kvselect import __version__
from vllm_kvselect.engine.platforms import has_fp8_caches
from vllm_kvselect.machine import dtype_name, fast_dtype
from vllm_kvselect.tiny_model import tiny_model

STOCK = Path(vllm.__file__).parent
WIDTH = 15


def doctor(*options: str, **environment: str) -> tuple[int, dict[str, str]]:
    """Status, and what was said of each subject."""
    command = [str(Path(sys.executable).with_name("vllm-kvselect")), "doctor", *options]
    result = subprocess.run(
        command,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.stdout, result.stderr
    lines = result.stdout.splitlines()
    return result.returncode, {line[:WIDTH].strip(): line[WIDTH:] for line in lines}


def test_this_installation_can_serve_the_small_model() -> None:
    status, said = doctor("--model", str(tiny_model()))
    assert status == 0
    assert said["vllm-kvselect"].startswith(f"{__version__}, Python 3.")
    assert said["vLLM"] == f"{vllm.__version__}, known"
    assert said["platform"].startswith("cpu: ")
    assert said["data type"].startswith(f"{dtype_name(fast_dtype())} is fast")
    assert said["data type"].endswith(
        "; fp8 KV caches" if has_fp8_caches() else "; no fp8 KV caches"
    )
    assert said["kernels"].startswith("compiled; bfloat16")
    assert said["model runner"] == "V1"
    assert "LlamaForCausalLM, 30 of 30 layers drop entries" in said["model"]
    assert said["verdict"] == "requests can be served with eviction"
    assert len(said) == 11  # nothing of vLLM's own stands between


def test_pytorch_held_to_avx2_is_told_to_use_float32() -> None:
    status, said = doctor("--model", str(tiny_model()), ATEN_CPU_CAPABILITY="avx2")
    assert status == 0
    expected = "float32 is fast, others are not; add --dtype float32; "
    assert said["data type"].startswith(expected)
    assert said["kernels"] == "compiled; bfloat16 widened to float32, AVX2; float32, AVX2"
    assert "30 of 30 layers drop entries; This processor has no instr" in said["model"]


def test_without_a_compiler_it_is_slow_and_an_mla_model_stops(tmp_path: Path) -> None:
    config, reason = MODELS["MLA"]
    written(tmp_path, **config)
    missing = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "none"), "CXX": "no-compiler"}
    status, said = doctor("--model", str(tmp_path), **missing)
    assert status == 1
    assert said["kernels"].startswith("plain PyTorch, several times slower: ")
    assert said["kernels"].endswith("there is no C++ compiler (no-compiler); install g++")
    assert reason in said["model"]
    assert said["verdict"] == "nothing can be served with eviction; see model"


def link(stock: Path, copy: Path) -> None:
    """A folder of links to a folder's entries, but for what Python compiled there."""
    copy.mkdir()
    for entry in stock.iterdir():
        if entry.name != "__pycache__":
            (copy / entry.name).symlink_to(entry)


@pytest.fixture
def another_vllm(tmp_path: Path) -> Path:
    """The installed vLLM under another number, and with a change in a function that is hooked."""
    link(STOCK, tmp_path / "vllm")
    for folder in ("v1", "v1/core"):
        (tmp_path / "vllm" / folder).unlink()
        link(STOCK / folder, tmp_path / "vllm" / folder)
    for name, old, new in (
        ("_version.py", vllm.__version__, "0.40.0"),
        ("v1/core/kv_cache_manager.py", "def get_computed_blocks(", "def get_computed_blocks(\n"),
    ):
        text = (STOCK / name).read_text()
        assert old in text
        (tmp_path / "vllm" / name).unlink()
        (tmp_path / "vllm" / name).write_text(text.replace(old, new))
    return tmp_path


def test_an_unknown_release_names_the_function_that_changed(another_vllm: Path) -> None:
    path = os.pathsep.join(filter(None, (str(another_vllm), os.environ.get("PYTHONPATH"))))
    status, said = doctor(PYTHONPATH=path)
    assert status == 1
    assert said["vLLM"].startswith("0.40.0, unknown to this release of vllm-kvselect; known: 0.32")
    assert "KVCacheManager.get_computed_blocks changed); install vLLM 0.32.0 or" in said["hooks"]
    assert said["names"].endswith("are there")
    assert said["verdict"] == "nothing can be served with eviction; see hooks"
