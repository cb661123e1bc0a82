"""The kit for a GPU, walked on the processor."""

import importlib
import json
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.own_process import python

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "benchmarks" / "gpu"
RUN_ALL = str(SCRIPTS / "run_all.py")
WITHOUT_ENGINES = ("view", "cut", "attention")


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`run_all.py`, beside which its modules are found."""
    pytest.importorskip("vllm")
    monkeypatch.syspath_prepend(str(SCRIPTS.parent))
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("run_all")


@pytest.mark.parametrize("steps", [WITHOUT_ENGINES, pytest.param((), marks=pytest.mark.load)])
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kit itself is run")
@pytest.mark.timeout(3600)  # a walk takes minutes, and more on a busy machine
def test_a_dry_run_walks_steps_and_writes_its_table(
    steps: tuple[str, ...], kit: ModuleType, tmp_path: Path
) -> None:
    table = tmp_path / "gpu.md"
    only = [part for step in steps for part in ("--only", step)]
    result = python(RUN_ALL, "--dry-run", "--output", table, *only, cwd=ROOT, timeout=3600)
    lines = table.read_text().splitlines()
    assert "DRY RUN" in lines[0]
    for step in steps or kit.STEPS:
        asked = kit.STEPS[step].asks
        assert sum(line.startswith(f"| {step} |") for line in lines) >= len(asked), step
    printed = [line for line in result.stdout.splitlines() if line.startswith("{")]
    assert printed == table.with_suffix(".jsonl").read_text().splitlines()
    assert all({"at", "step", "engine", "what", "result"} <= json.loads(p).keys() for p in printed)


def test_nothing_is_measured_where_there_is_no_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = python(RUN_ALL, fails=True)
    assert "there is no GPU; nothing was proved or measured" in result.stderr


def test_each_half_is_expected_to_end_in_time(kit: ModuleType) -> None:
    for half in ((1, 2), (3, 4)):
        *steps, _ = [step for step in kit.STEPS.values() if step.group in half]
        starts = sum(kit.STARTS[group - 1] for group in half)
        assert starts + sum(step.seconds for step in steps) <= 360
    asked = {engine for step in kit.STEPS.values() for engine, _ in step.asks}
    assert asked == {*kit.ENGINES, "attention"}


class Engine:
    """Stands in for a child of the kit; `events` has what happened, in order."""

    events: list[str]

    def __init__(self, name: str, error: type[Exception], late: bool, wrong: bool) -> None:
        self._name, self._error, self._late, self._wrong = name, error, late, wrong

    def answer(self, seconds: float) -> dict[str, Any]:
        if self._late:
            raise self._error(f"ended: it took more than {seconds:.0f} s")
        return {"what": "ready", "result": ""}

    def ask(self, command: dict[str, Any], seconds: float) -> dict[str, Any]:
        if self._wrong:
            raise self._error("wrong")
        self.events.append(f"{self._name} asked")
        return {"what": "", "result": ""}

    def end(self) -> None:
        self.events.append(f"{self._name} ended")


def run(
    kit: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    late: str = "",
    wrong: str = "",
    seconds: float = 300,
) -> tuple[list[str], list[str]]:
    """Runs two steps of a group and one of the next; what happened and what failed."""
    events: list[str] = []
    monkeypatch.setattr(Engine, "events", events, raising=False)
    monkeypatch.setattr(kit, "ENGINES", dict(zip("abc", "abc", strict=True)))
    monkeypatch.setattr(
        kit, "child", lambda name, _: Engine(name, kit.BenchmarkError, name in late, name in wrong)
    )
    steps = {
        "proof": kit.Step(1, 1, kit.each("a", {}), proves=True),
        "first": kit.Step(1, 50, kit.each("b, c", {})),
        "second": kit.Step(2, 1, kit.each("c", {})),
    }
    made = kit.Kit(steps, seconds, folder / "lines.jsonl", folder)
    made.run()
    return events, made.failed


def test_engines_are_asked_one_after_the_other_and_end_with_their_last_step(
    kit: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events, failed = run(kit, monkeypatch, tmp_path)
    assert events == ["a asked", "a ended", "b asked", "c asked", "b ended", "c asked", "c ended"]
    assert not failed


def test_who_is_late_is_ended_before_anything_is_timed(
    kit: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events, failed = run(kit, monkeypatch, tmp_path, late="c")
    assert events.index("c ended") < events.index("b asked")
    assert "c asked" not in events
    assert failed == ["start, c"] * 2  # it is tried again with the next group


def test_nothing_comes_after_a_failed_proof_or_the_end_of_the_time(
    kit: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events, failed = run(kit, monkeypatch, tmp_path, wrong="a")
    assert (sorted(events), failed) == (["a ended", "b ended", "c ended"], ["proof, a"])
    events, failed = run(kit, monkeypatch, tmp_path, late="a")  # there was none
    assert (events[1:4], failed) == (["b asked", "c asked", "b ended"], ["start, a"])
    events, failed = run(kit, monkeypatch, tmp_path, seconds=20)
    assert failed == ["first, b", "first, c"]  # which would take too long
    assert [event for event in events if "asked" in event] == ["a asked", "c asked"]


def test_a_child_that_takes_too_long_is_ended(
    kit: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sleeping = tmp_path / "sleeping.py"
    sleeping.write_text("import time\ntime.sleep(60)\n")
    start = time.monotonic()
    made = kit.Child(str(sleeping), {"eviction": None}, small=True)
    with pytest.raises(kit.BenchmarkError, match="took more than 1 s"):
        made.answer(1.0)
    made.end()
    assert time.monotonic() - start < 30


def test_proofs_fail_where_something_is_wrong(kit: ModuleType) -> None:
    def read(*nats: float) -> dict[str, list[float]]:
        return {"nats": [*nats]}

    stock = [read(5.0, 6.0), read(5.01, 6.0)]
    assert kit.kept_is_stock({"loud stock": stock, "loud 1/8": [read(5.0, 6.01), read(6.0, 4.0)]})
    for ours in ([read(5.1, 6.1), read(6.0, 4.0)], [read(5.0, 6.01), read(5.01, 6.01)]):
        with pytest.raises(kit.BenchmarkError):  # not as in stock; not loud
            kit.kept_is_stock({"loud stock": stock, "loud 1/8": ours})
    one = [read(5.0, 6.0), read(7.0, 4.0)]
    assert kit.backends_agree({"one": one, "other": [read(5.0, 6.01), read(7.1, 4.0)]})
    with pytest.raises(kit.BenchmarkError):
        kit.backends_agree({"one": one, "other": [read(5.0, 6.0), read(5.0, 6.0)]})
    same = {"tokens": [[1, 2, 3]]}
    assert kit.drafts_change_nothing({"without": [same], "with": [same]})
    with pytest.raises(kit.BenchmarkError):
        kit.drafts_change_nothing({"without": [same], "with": [{"tokens": [[1, 5, 6]]}]})
    memory = [{"peak_gib": 3.0, "reserved_gib": 2.2}]
    assert kit.memory_was_reserved({"stock long": [{"peak_gib": 0.9}], "1/8 long": memory})
    with pytest.raises(kit.BenchmarkError):
        kit.memory_was_reserved({"stock long": [{"peak_gib": 0.7}], "1/8 long": memory})


@pytest.mark.usefixtures("kit")
def test_the_view_reads_as_many_entries_as_stocks_call(monkeypatch: pytest.MonkeyPatch) -> None:
    kit, read = importlib.import_module("attention"), []

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
    kit: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tests.engine import flash_attention
    from tests.kernels import interpreter
    from vllm_kvselect.engine.cuda.flash_attention import HeadwiseFlashAttentionBackend
    from vllm_kvselect.kernels import cuda

    flash_attention.install(monkeypatch)
    interpreter.quicken()
    cut = importlib.import_module("cut")
    monkeypatch.setattr(cut, "device_kernels", lambda: cuda.KERNELS)
    folder = kit.write(tmp_path / "model", kit.config_of("8b"))
    with torch.inference_mode():
        layers = cut.Layers(folder, HeadwiseFlashAttentionBackend)
        for method in (*cut.CUTS, "layer-defensivekv", "layer-keydiff"):
            assert layers.same_as_references(cut.settings(method)) == 1.0, method
            assert layers.state.num_evicted == sum(map(len, cut.CASES))
            entries = layers.retained()
            assert len(entries.unique()) == len(entries) > 0  # each once


def test_the_archive_holds_what_the_kit_imports(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    archive, unpacked = tmp_path / "kit.tar.xz", tmp_path / "kit"
    python(SCRIPTS / "pack.py", archive, "--wheels", "")
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    code = """
import sys
from importlib.metadata import distribution, entry_points
sys.path[:0] = sys.argv[1:]
import attention, cut, engines, proofs, run_all
import vllm_kvselect.evaluation.run, vllm_kvselect.cli, vllm_kvselect.engine.cuda.worker
(plugin,) = entry_points(group="vllm.general_plugins", name="kvselect")
print(plugin.load().__module__, distribution("vllm-kvselect").locate_file("."))
print(*(getattr(module, "__file__", None) for module in list(sys.modules.values())), sep="\\n")
"""
    folders = unpacked / "benchmarks" / "gpu", unpacked / "benchmarks"
    result = python("-c", code, *folders, cwd=tmp_path, PYTHONPATH=str(unpacked))
    plugin, *files = result.stdout.splitlines()
    assert plugin == f"vllm_kvselect.plugin {unpacked}"
    ours = [file for file in files if "vllm_kvselect/" in file or "benchmarks/" in file]
    assert len(ours) > 50
    assert [file for file in ours if not file.startswith(str(unpacked))] == []
