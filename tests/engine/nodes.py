"""Two nodes on this machine: `vllm serve` for each, as their users start them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.utils.network_utils import get_open_port

from tests.marks import starts_engine

LOOPBACK = "127.0.0.1"


def two_nodes() -> dict[str, Any]:
    """Settings by which two nodes find each other, or give up."""
    address = {"master_addr": LOOPBACK, "master_port": get_open_port()}
    return {"nnodes": 2, **address, "distributed_timeout_seconds": 180}


@starts_engine
def first_node(model: Path, settings: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Runs the first node until it gives up.

    Args:
        model: What both serve.
        settings: Of its engine.

    Returns:
        Its exit status, and all that it printed.
    """
    port = ["--port", str(get_open_port())]
    with _surroundings():
        return subprocess.run(
            [*_command(model, settings), *port],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )


@starts_engine
@contextmanager
def second_node(folder: Path, model: Path, settings: dict[str, Any]) -> Iterator[None]:
    """Runs the second node while the first one is started and used.

    Args:
        folder: For its log.
        model: What both serve.
        settings: What the first one is given, too.
    """
    command = [*_command(model, settings), "--headless", "--node-rank", "1"]
    with _surroundings(), (folder / "log").open("w") as log:
        node = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ, start_new_session=True
        )
        try:
            yield
        finally:
            os.killpg(node.pid, signal.SIGTERM)
            try:
                node.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()


@contextmanager
def _surroundings() -> Iterator[None]:
    """What both nodes find in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_HOST_IP", LOOPBACK)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # Functions of tests are sent to its worker by name.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        yield


def _command(model: Path, settings: dict[str, Any]) -> list[str]:
    vllm = str(Path(sys.executable).with_name("vllm"))
    return [vllm, "serve", str(model), *_options(settings)]


def _options(settings: dict[str, Any]) -> list[str]:
    """The settings of an `LLM` on the command line."""
    given = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if value is True:
            given.append(f"--{option}")
        elif value is not False:  # which is the default of all that tests switch
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            given += [f"--{option}", text]
    return given
