"""Everything that is proved and measured on a GPU, in this order, without network or weights.

Each step is a process of its own with a time limit, prints its line the moment it ends, and can be
run alone (`--only`). What is not proved is not measured: a proof that fails ends the run. The
report is one Markdown table.

The limits add up to less than 25 minutes. On an H200 the four proofs took 4. That what is measured
keeps within its limits is arithmetic.

`--dry-run` walks every step on the processor, at small sizes and with stand-ins for attention's
calls. It proves that the kit runs, and nothing else.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        command: What is run, after Python's name.
        dry: The same in a dry run.
        limit: Seconds after which it is ended.
        proves: Whether nothing is measured after it fails.
    """

    command: tuple[str, ...]
    dry: tuple[str, ...]
    limit: float
    proves: bool = False


def _script(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(HERE / f"{name}.py"), *arguments)


_TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/test_triton.py")
STEPS = {
    # Most of their time is Triton's compiler.
    "kernels": Step((*_TESTS, "-n", "8"), (*_TESTS, "-k", "order_of_scores"), 240, proves=True),
    "view": Step(_script("proofs", "view"), _script("proofs", "view"), 90, proves=True),
    "tokens": Step(_script("proofs", "tokens"), _script("proofs", "tokens"), 270, proves=True),
    "memory": Step(_script("proofs", "memory"), _script("proofs", "memory"), 180, proves=True),
    "selection": Step(
        _script("selection", "--rounds", "7"), _script("selection", "--dry-run"), 120
    ),
    "cut": Step(_script("cut"), _script("cut", "--dry-run"), 115),
    "decode": Step(_script("attention"), _script("attention", "--dry-run"), 120),
    "throughput": Step(
        _script("end_to_end"), _script("end_to_end", "--dry-run", "--engines", "stock,plugin"), 360
    ),
}
"""In their order; throughput has the times to the first token, too."""


def main(
    only: Annotated[list[str] | None, typer.Option(help="Steps to run; all if left out.")] = None,
    output: Annotated[Path, typer.Option(help="Where the table goes.")] = Path("gpu.md"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="On the processor, small, with stand-ins.")
    ] = False,
) -> None:
    """Runs the steps one after the other and writes one Markdown table."""
    if unknown := {*(only or ())} - STEPS.keys():
        sys.exit(f"error: unknown steps {sorted(unknown)}; there are {', '.join(STEPS)}")
    if not torch.cuda.is_available() and not dry_run:
        sys.exit("error: there is no GPU; nothing was proved or measured (--dry-run needs none)")
    lines, failed = [*heading(dry_run)], []
    for name, step in STEPS.items():
        if only and name not in only:
            continue
        start = time.monotonic()
        rows, problem = run(step.dry if dry_run else step.command, step.limit)
        seconds = time.monotonic() - start
        print(f"{name}: {problem or 'done'} ({seconds:.0f} s)", flush=True)
        lines += [f"| {name} | {what} | {result} |" for what, result in rows]
        lines.append(f"| {name} | {problem or 'whole step'} | {seconds:.0f} s |")
        output.write_text("\n".join(lines) + "\n")
        if problem:
            failed.append(name)
            if step.proves:
                break
    print(output.read_text())
    if failed:
        sys.exit(f"error: {', '.join(failed)} failed; what comes after a failed proof was not run")


def heading(dry_run: bool) -> list[str]:
    """What it ran on, and the head of the table."""
    card = "a processor, DRY RUN: nothing below is a measurement"
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        card = f"{torch.cuda.get_device_name()}, driver {driver[0] if driver else 'unknown'}"
        if dry_run:
            card += ", DRY RUN: nothing below is a measurement"
    what = f"{card}; vLLM {version('vllm')}, torch {torch.__version__}"
    return [
        f"{what}, triton {version('triton')}.",
        "",
        "| step | what | result |",
        "| --- | --- | --- |",
    ]


def run(command: tuple[str, ...], limit: float) -> tuple[list[tuple[str, str]], str | None]:
    """Runs a step until its limit; its rows are printed as they come.

    Returns:
        The rows, and what went wrong, or None.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if not torch.cuda.is_available():  # engines in one process each start in half the time
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # A session of its own: engines that the script has started end with it.
    child = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )
    ended = _Limit(child, limit)
    rows, last = [], ""
    assert child.stdout is not None
    for line in child.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last
        if line.startswith('{"what"'):
            found = json.loads(line)
            rows.append((found["what"], found["result"]))
    code = child.wait()
    if ended.is_ended():
        return rows, f"ended after {limit:.0f} s"
    return rows, None if code == 0 else f"failed: {last[:300]}"


class _Limit:
    """Ends a process and what it has started after some seconds."""

    def __init__(self, child: "subprocess.Popen[str]", seconds: float) -> None:
        from threading import Timer

        self._child, self._was_ended = child, False
        self._timer = Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        if self._child.poll() is None:
            self._was_ended = True
            os.killpg(self._child.pid, signal.SIGKILL)

    def is_ended(self) -> bool:
        """Whether it was; the timer stops."""
        self._timer.cancel()
        return self._was_ended


if __name__ == "__main__":
    typer.run(main)
