"""Engines of one process start and stop quickly: what vLLM does anew for each is done once."""

import functools
import gc
import os
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine import coordinator, core
from vllm.v1.engine import utils as engine_utils
from vllm.v1.executor import multiproc_executor
from vllm.v1.worker import gpu_worker


def _nothing(*_: Any) -> None:
    """Instead of what has been done."""


class _Process(ForkServerProcess):
    """A process that has imported vLLM before it starts, in the environment of who starts it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Context(ForkServerContext):
    """Where engines and their ranks get their processes from, in place of new interpreters."""

    Process = _Process  # type: ignore[assignment]


@functools.cache
def _context() -> _Context:
    context = _Context()
    context.set_forkserver_preload(["vllm_kvselect.engine.cpu.worker", "vllm.v1.engine.core"])
    return context


def look_at_models_here() -> None:
    """What a model's class can do vLLM asks of it in a new process, for 10 s, to keep off GPUs."""
    registry._run_in_subprocess = lambda look: look()


@functools.cache
def start_quickly() -> None:
    """Makes it so for the engines of this process.

    Without it one takes 6.7 s of processor time to start and to stop, of which 0.8 s are its own,
    and a process that it starts another 11 s for its imports.
    """
    # Modules are frozen (`tests/process_memory.py`) and stay so: an engine would have the garbage
    # collector look at all of them five times. Its own objects are not frozen, and go with it.
    gc.unfreeze = core.freeze_gc_heap = gpu_worker.freeze_gc_heap = _nothing
    # It compares every attribute of every module with Triton's kernels, and fails at numba's.
    CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = _nothing
    from vllm.v1.spec_decode import ngram_proposer  # brings numba

    # numba compiles them for 15 s. In Python they are as right.
    for name in ("batch_propose_numba", "_find_longest_matched_ngram_and_propose_tokens"):
        setattr(ngram_proposer, name, getattr(ngram_proposer, name).py_func)
    ngram_proposer.get_num_threads = ngram_proposer.set_num_threads = _nothing
    for module in (multiproc_executor, engine_utils, coordinator):
        module.get_mp_context = _context
