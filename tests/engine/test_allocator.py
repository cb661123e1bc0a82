"""Freed memory is kept: page faults of a process that takes and frees the same again and again."""

import pytest

from tests.own_process import python

FAULTS = """
import resource, sys, torch
from vllm_kvselect.engine.cpu.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory() is (sys.argv[2] == "asked")
if sys.argv[1] == "worker":
    from vllm_kvselect.engine.cpu.worker import EvictionCPUWorker
    from vllm_kvselect.engine.step.worker import EvictionWorker
    EvictionWorker.load_model = lambda self: None  # there is no model to load
    EvictionCPUWorker.load_model(EvictionCPUWorker.__new__(EvictionCPUWorker))
def layer():
    torch.ones(40 * 2**18)  # 40 MiB, freed at once
for _ in range(8):
    layer()  # the heap grows to what is needed
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    layer()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def num_faults(*arguments: str, **environment: str) -> int:
    result = python("-W", "ignore", "-c", FAULTS, *arguments, **environment)
    return int(result.stdout.split()[-1])


@pytest.mark.parametrize("asked_by", ["keep", "worker"])
def test_memory_is_not_taken_anew_from_the_kernel(asked_by: str) -> None:
    """Neither after the call itself nor after the worker has loaded its model."""
    by_default = num_faults("default", "")
    if by_default < 1000:
        pytest.skip("this system maps large pages, or has another allocator")
    # The heap may still move once or twice, but not each time.
    assert num_faults(asked_by, "asked") < by_default / 4


def test_the_users_own_settings_are_left_alone() -> None:
    num_faults("keep", "left", MALLOC_TRIM_THRESHOLD_="131072")
