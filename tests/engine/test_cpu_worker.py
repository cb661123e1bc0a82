"""The CPU worker says which kernels select, and why where it is the slow ones."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from vllm_kvselect.engine.cpu.worker import EvictionCPUWorker
from vllm_kvselect.kernels import cpu
from vllm_kvselect.kernels.base import REFERENCES
from vllm_kvselect.kernels.build import KernelError


@pytest.fixture
def vllm_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What reaches vLLM's own logger, whose handler writes its prefix."""
    logger = logging.getLogger("vllm")
    caplog.set_level(logging.INFO, logger="vllm.kvselect")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def worker() -> EvictionCPUWorker:
    """A worker that knows its model's type and no more."""
    worker = EvictionCPUWorker.__new__(EvictionCPUWorker)
    worker.model_config = SimpleNamespace(dtype=torch.float32)
    return worker


def test_the_tier_is_named(worker: EvictionCPUWorker, vllm_log: pytest.LogCaptureFixture) -> None:
    assert worker._load_kernels() is cpu.KERNELS
    instructions = torch.backends.cpu.get_cpu_capability()
    assert vllm_log.messages[-1] == (
        f"KV eviction selects with compiled kernels: float32, {instructions}"
    )


def test_the_reason_for_the_slow_one_is_given_with_what_to_do(
    worker: EvictionCPUWorker, vllm_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise KernelError("ninja is missing", "install it")

    monkeypatch.setattr(cpu, "load", fail)
    assert worker._load_kernels() is REFERENCES
    assert vllm_log.records[-1].levelno == logging.WARNING
    assert vllm_log.messages[-1] == (
        "KV eviction selects in plain PyTorch, several times slower: "
        "the CPU kernels are not available: ninja is missing; install it"
    )
