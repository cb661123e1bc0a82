"""Peers; what they compute with is not installed here, so one counts instead of computing."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from peer_answers import main
from peers import kvpress, worker
from peers.answers import PeerConfig
from peers.openvino import eviction, share_retained
from peers.worker import Worker
from typer.testing import CliRunner

from tests.offline.conftest import llama, llama_folder, tokenizer  # noqa: F401 (fixtures)
from vllm_kvselect.cli import app
from vllm_kvselect.config import ConfigError
from vllm_kvselect.evaluation.predictions import Setting, read
from vllm_kvselect.offline.errors import EvaluationError

SCRIPT = """
import sys
from peers.lines import serve

def answers(job):
    print("what a library says")
    for number in range(job["count"]):
        yield {"number": number, "path": sys.path}
    if job["fails"]:
        raise RuntimeError("the peer is out of memory")

serve(answers)
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment whose interpreter is this one, with a worker that only counts."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "count.py").write_text(SCRIPT)
    monkeypatch.setattr(worker, "WORKERS", tmp_path)
    return tmp_path


def test_a_worker_answers_one_job_after_the_other(environment: Path) -> None:
    with Worker(environment, "count.py") as peer:
        for count in (2, 0, 3):
            found = list(peer.ask({"count": count, "fails": False}))
            assert [each["number"] for each in found] == list(range(count))
        (answer,) = peer.ask({"count": 1, "fails": False})
    assert not {str(each.parent) for each in worker.VISIBLE} & set(answer["path"])


def test_the_end_of_its_log_says_why_a_worker_failed(environment: Path) -> None:
    with (
        Worker(environment, "count.py") as peer,
        pytest.raises(EvaluationError, match="the peer is out of memory"),
    ):
        list(peer.ask({"count": 1, "fails": True}))


def test_openvino_retains_whole_blocks_within_its_budget() -> None:
    options = eviction("openvino", 250)
    assert options["max_cache_size"] == 224
    assert share_retained(1000, options) == pytest.approx((224 + 1000 % 32) / 1000)
    assert share_retained(200, options) == 1.0
    crushed = eviction("openvino-kvcrush", 250)
    kept = crushed["max_cache_size"] + 32 * crushed["kvcrush_blocks"]
    assert (kept, crushed["kvcrush_blocks"]) == (224, 1)
    with pytest.raises(EvaluationError, match="retains 96 entries at least"):
        eviction("openvino", 95)


@pytest.fixture
def evaluation(tmp_path: Path, llama_folder: Path) -> Path:  # noqa: F811
    """The folder of an evaluation, with its examples."""
    run(app, "evaluate", *needles(tmp_path / "ours", llama_folder))
    return tmp_path / "ours"


def needles(out: Path, model: Path) -> list[str]:
    size = ["--lengths", "300", "--num-examples", "2", "--methods", "snapkv", "--budgets", "0.5"]
    return ["needles", "--model", str(model), "--dtype", "float32", *size, "--out", str(out)]


def run(command: typer.Typer, *options: str) -> str:
    result = CliRunner().invoke(command, options)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_peers_answers_stand_in_the_table_of_the_evaluation(
    evaluation: Path,
    llama_folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []

    class Peer(Worker):
        def __init__(self, *_: Any) -> None: ...

        def __exit__(self, *_: Any) -> None: ...

        def ask(self, job: dict[str, Any]) -> Iterator[Any]:
            for example in job["examples"]:
                asked.append(job | example)
                yield {"example": example["example"], "tokens": [28], "retained": 0.25}

    monkeypatch.setattr(kvpress, "Worker", Peer)
    monkeypatch.setattr(kvpress, "make_environment", lambda _: tmp_path)
    script = typer.Typer()
    script.command()(main)
    options = ("kvpress", str(evaluation), "--methods", "kvzip", "--budgets", "0.25")
    for _ in range(2):  # what is answered is not asked again
        answers = Path(run(script, *options).strip())
    examples = list(map(json.loads, (evaluation / "examples.jsonl").read_text().splitlines()))
    assert [each["prompt"] for each in asked] == 2 * [
        (*each["context"], *each["question"]) for each in examples
    ]
    ratios = [0.0, 0.0, *(pytest.approx(1 - 75 / 300, abs=0.01) for _ in examples)]
    assert [each["ratio"] for each in asked] == ratios
    assert {each["model"] for each in asked} == {str(llama_folder)}
    found = list(read(answers))
    assert {each.setting for each in found} == {
        Setting("regular", "none", None, "kvpress"),
        Setting("regular", "kvzip", 0.25, "kvpress"),
    }
    run(app, "evaluate", *needles(evaluation, llama_folder), "--also", str(answers))
    assert "| kvzip (kvpress) | 0.25 | 25.0% |" in (evaluation / "table.md").read_text()


@pytest.mark.parametrize(
    ("suite", "values", "message"),
    [
        ("needles", {"peer": "llamacpp"}, "peer = 'llamacpp'"),
        ("needles", {"methods": ["snapkw"]}, "kvpress has no snapkw; there are kvzip, "),
        ("needles", {"budgets": [1.5]}, "budget = 1.5"),
        ("needles", {"scenarios": []}, "scenarios = "),
        ("stories", {}, "are the engine's alone"),
        ("needles", {"peer": "openvino", "scenarios": ["context-only"]}, "cannot compress a text"),
        ("given-answers", {"peer": "openvino"}, "does not tell likelihoods"),
    ],
)
def test_a_peer_is_not_asked_for_what_it_cannot(
    suite: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    evaluation = {"suite": suite, "model": "", "data": "", "dtype": "", "eviction": {}, "seed": 0}
    (tmp_path / "run.json").write_text(json.dumps(evaluation))
    asked = {"peer": "kvpress", "scenarios": ["regular"], "methods": [], "budgets": [0.5]}
    with pytest.raises((ConfigError, EvaluationError), match=message):
        PeerConfig.of(tmp_path, **asked | values)


def test_a_folder_without_an_evaluation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="holds no evaluation; run one first"):
        PeerConfig.of(tmp_path)
