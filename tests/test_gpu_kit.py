"""The kit for a GPU, walked on the processor."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.timeout(1000)  # a walk takes minutes on a busy machine

ROOT = Path(__file__).parents[1]
RUN_ALL = str(ROOT / "benchmarks" / "gpu" / "run_all.py")
WITH_ENGINES = ("tokens", "memory", "throughput")
STEPS = ("kernels", "view", "selection", "cut", "decode")


@pytest.mark.parametrize("steps", [STEPS, pytest.param(WITH_ENGINES, marks=pytest.mark.load)])
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kit itself is run")
def test_a_dry_run_walks_steps_and_writes_its_table(steps: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    table = tmp_path / "gpu.md"
    command = [sys.executable, RUN_ALL, "--dry-run", "--output", str(table)]
    command += [part for step in steps for part in ("--only", step)]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    lines = table.read_text().splitlines()
    assert "DRY RUN" in lines[0]
    assert lines[2:4] == ["| step | what | result |", "| --- | --- | --- |"]
    for step in steps:
        # More than that the step ended: what it found.
        assert sum(line.startswith(f"| {step} |") for line in lines) > (step != "kernels"), step


def test_nothing_is_measured_where_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = subprocess.run(
        [sys.executable, RUN_ALL], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode != 0
    assert "there is no GPU; nothing was proved or measured" in result.stderr


def script(name: str) -> ModuleType:
    """One of the kit's scripts as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / "gpu" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_view_reads_as_many_entries_as_stocks_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    kit, read = script("attention"), []

    def called(_: str) -> Callable[..., None]:
        return lambda **given: read.append(given["seqused_k"].clone())

    monkeypatch.setattr(kit, "attention_call", called)
    kit.stock(3, 2033)()
    kit.one_head(3, 2033, uneven=False)()
    kit.one_head(3, 2033, uneven=True)()
    stock, even, uneven = read
    assert {*stock.tolist(), *even.tolist()} == {2033}
    assert int(uneven.sum()) == 3 * kit.KV_HEADS * 2033
    read.clear()
    kit.main(dry_run=True)
    means = [float(lengths.float().mean()) for lengths in read]
    # Per batch stock's, the view's and the view's with uneven heads; then the full cache.
    asked = 64
    assert {*means} == {asked - kit.BLOCK_SIZE + 1, kit.FULL * asked}


def test_a_cards_layers_make_the_cuts_that_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from tests.engine import flash_attention
    from tests.kernels import interpreter
    from vllm_kvselect.engine.cuda.flash_attention import HeadwiseFlashAttentionBackend
    from vllm_kvselect.kernels import cuda
    from vllm_kvselect.kernels.base import REFERENCES

    monkeypatch.setattr(sys, "path", [*sys.path])
    flash_attention.install(monkeypatch)
    interpreter.quicken()
    kit = script("cut")
    folder = kit.write(str(tmp_path), kit.TINY)
    with torch.inference_mode():
        ours, references = (
            kit.Layers(folder, kit.DRY_LENGTH, 2, HeadwiseFlashAttentionBackend, kernels)
            for kernels in (cuda.KERNELS, REFERENCES)
        )
        for method in kit.CUTS:
            found = []
            for layers in (ours, references):
                before = layers.state.num_evicted
                layers.come_to_cut(kit.settings(method, kit.DRY_BUDGET), 2)
                kit.make(layers.builder.due, layers.due)
                assert layers.state.num_evicted == before + 2
                found.append(layers.retained().sort().values)
            assert len(found[0].unique()) == len(found[0]) > 0  # each entry once
            assert torch.equal(*found), method
