"""Everything that is measured on a GPU, within ten minutes, without network or weights.

Runs `attention.py`, `selection.py` and `end_to_end.py` one after the other, ends what takes too
long, and writes what they printed as JSON into one file. What did not run is named.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

HERE = Path(__file__).parent
SCRIPTS = {
    "attention": ["attention.py"],
    "selection": ["selection.py", "--rounds", "7"],
    "end to end": ["end_to_end.py"],
}


def main(
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("gpu.json"),
    minutes: Annotated[float, typer.Option(help="After this, what still runs is ended.")] = 9.5,
) -> None:
    """Runs all, prints their tables, writes one JSON file; fails if a part did not end well."""
    if not torch.cuda.is_available():
        sys.exit("error: there is no GPU; nothing was measured")
    deadline = time.monotonic() + 60 * minutes
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    failed = []
    for name, (script, *options) in SCRIPTS.items():
        print(f"== {name}", flush=True)
        lines, succeeded = run([sys.executable, str(HERE / script), *options], deadline)
        results[name] = [json.loads(line) for line in lines if line.startswith("{")]
        if not succeeded:
            failed.append(name)
    results["failed"] = failed
    output.write_text(json.dumps(results, indent=1))
    print(json.dumps(results))
    if failed:
        sys.exit(f"error: {', '.join(failed)} failed, or did not end within {minutes:g} minutes")


def run(command: list[str], deadline: float) -> tuple[list[str], bool]:
    """Runs a script until the deadline.

    Returns:
        The lines it printed, and whether it ended well.
    """
    # A session of its own: engines that the script has started end with it.
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        text, _ = child.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        text, _ = child.communicate()
    lines, succeeded = text.splitlines(), child.returncode == 0
    print("\n".join(line for line in lines if not line.startswith("{")), flush=True)
    return lines, succeeded


if __name__ == "__main__":
    typer.run(main)
