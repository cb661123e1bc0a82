"""Modules of the tests that run in a process of their own, and say what they found as JSON."""

import json
import os
import subprocess
import sys
from typing import Any


def said_by(module: str, *arguments: str, timeout: float = 900, **environment: str) -> Any:
    """The last line of what a module prints, run by itself.

    Args:
        module: Its name.
        arguments: Its arguments.
        timeout: Seconds that it may take.
        environment: Variables, of which by default one has Triton interpret its kernels.
    """
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
