"""Settings of the whole suite: one thread per process, since two test processes share two cores.

Triton's kernels run in its interpreter where there is no GPU. It wants to be told before anyone
imports Triton, and packages that vLLM needs do.
"""

import os
import shutil

import pytest
from hypothesis.internal.conjecture import providers

from tests import marks, process_memory, slow

pytest.register_assert_rewrite("tests.kernels.twins")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("XFORMERS_ENABLE_TRITON", "1")  # without a GPU too

# Hypothesis takes constants from the modules that are loaded: what is drawn, derandomized or not,
# would depend on the tests that ran before.
providers._get_local_constants = providers.Constants


def pytest_configure(config: pytest.Config) -> None:
    for plugin in (marks, process_memory, slow):
        config.pluginmanager.register(plugin)


def pytest_addoption(parser: pytest.Parser) -> None:
    slow.add_option(parser)
    parser.addoption(
        "--machine-steps",
        type=int,
        default=0,
        help="run the state machine of tests/engine/test_machine.py for so many steps, at random",
    )
