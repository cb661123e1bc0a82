"""Python in a process of its own, and modules of the tests that say there what they found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def python(
    *arguments: str | Path,
    fails: bool = False,
    cwd: Path | None = None,
    timeout: float = 300,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs this Python by itself, and asserts that it succeeds, or that it fails.

    Args:
        arguments: Its arguments.
        fails: Whether it must fail.
        cwd: The folder that it runs in; None for the current one.
        timeout: Seconds that it may take.
        environment: Variables beside those of this process.
    """
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert (result.returncode != 0) is fails, result.stdout[-3000:] + result.stderr[-3000:]
    return result


def said_by(module: str, *arguments: str, timeout: float = 900, **environment: str) -> Any:
    """The last line of what a module prints as JSON; by default Triton interprets its kernels."""
    variables = {"TRITON_INTERPRET": "1", **environment}
    result = python("-m", module, *arguments, timeout=timeout, **variables)
    return json.loads(result.stdout.splitlines()[-1])
