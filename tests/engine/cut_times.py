"""What a cut takes of the host, without a card: all that it does, but its kernels.

Run as a module in a process of its own; arguments are methods, all without any. Triton's kernels do
nothing, and operators compute on small tensors: a bound on what Python and they take. Prints the
milliseconds of each method, as JSON, for one request and for two.
"""

import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import pytest
import torch
from triton.runtime import interpreter

from tests.engine import flash_attention
from vllm_kvselect.engine.cuda.flash_attention import HeadwiseFlashAttentionBackend
from vllm_kvselect.kernels import cuda
from vllm_kvselect.registry import METHODS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_TIMES = 30


def times(methods: Sequence[str]) -> dict[str, list[float]]:
    """The least of each, by method: others may run beside it."""
    sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "gpu")]
    kit, cut = (importlib.import_module(name) for name in ("run_all", "cut"))
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as folder,
        torch.inference_mode(),
    ):
        flash_attention.install(patch)
        model = kit.write(Path(folder) / "model", kit.config_of("8b"))
        layers = cut.Layers(model, HeadwiseFlashAttentionBackend, cuda.KERNELS)
        # What no kernel has filled is read as numbers of pages.
        patch.setattr(interpreter.GridExecutor, "__call__", lambda *_, **__: None)
        patch.setattr(torch, "empty", torch.zeros)
        patch.setattr(torch, "empty_like", torch.zeros_like)
        patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
        found: dict[str, list[float]] = {}
        for method in methods:
            found[method] = []
            for case in cut.CASES:
                taken = []
                for _ in range(NUM_TIMES):
                    layers.come_to_cut(cut.settings(method), case)
                    begin = perf_counter()
                    layers.make()
                    taken.append(1e3 * (perf_counter() - begin))
                found[method].append(round(min(taken), 2))
        return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(times(sys.argv[1:] or [*METHODS])))
