"""Two ranks under vLLM's Ray executor answer and retain what two ranks under its own do.

Ray is not installed for tests. To run these: `pip install --target FOLDER ray`, and FOLDER in
PYTHONPATH.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine import test_ranks as ranks
from tests.engine.random_models import random_llama
from tests.engine.ray_on_cpu import entry_point

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("ranks")]


def main() -> None:
    """In a process of its own, since a process keeps its platform."""
    kind, model, out = sys.argv[1:]
    ray.init(num_gpus=2, include_dashboard=False)
    settings = ranks.SETTINGS[kind] | {"distributed_executor_backend": "ray"}
    served = ranks.serve(Path(model), ranks.CASES[kind], **settings)
    Path(out).write_bytes(pickle.dumps(served))


@pytest.mark.parametrize("kind", ["tensor"])
def test_ranks_under_ray_answer_and_retain_what_ranks_under_mp_do(
    kind: str, tmp_path: Path
) -> None:
    model, out = random_llama(tmp_path / "llama"), tmp_path / "served"
    here = filter(None, (str(entry_point(tmp_path / "path")), *sys.path))
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    result = subprocess.run(
        [*command, kind, str(model), str(out)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(here), "VLLM_HOST_IP": "127.0.0.1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    under_ray = pickle.loads(out.read_bytes())
    under_mp = ranks.serve(model, ranks.CASES[kind], **ranks.SETTINGS[kind])
    assert under_ray.answers == under_mp.answers
    assert [rank.retained for rank in under_ray.ranks] == [r.retained for r in under_mp.ranks]
    assert under_ray.metrics == under_mp.metrics
