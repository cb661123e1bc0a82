"""The process of a peer; what a peer computes with is not installed here, so one counts instead."""

import sys
from pathlib import Path

import pytest

from vllm_kvselect.evaluation.peers import worker
from vllm_kvselect.evaluation.peers.openvino import eviction, share_retained
from vllm_kvselect.evaluation.peers.worker import Worker
from vllm_kvselect.offline.errors import EvaluationError

SCRIPT = """
import sys
from vllm_kvselect.evaluation.peers.lines import serve

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
    assert str(worker.PACKAGE.parent) not in answer["path"]


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
