"""`vllm-kvselect doctor`: what this installation can do, in about ten lines."""

import logging
import os
from typing import Annotated

import typer


def doctor(
    model: Annotated[
        str | None, typer.Option(help="Model folder or hub name: can it be served, and why not?")
    ] = None,
) -> None:
    """Say what this installation can do: the first thing to send with a bug report.

    Everything that a start needs is tried, so this takes as long as a start of vLLM without a
    model. Ends with status 1 if nothing could be served.
    """
    # Else vLLM's own lines stand between ours. Whoever has set a level wants to see them.
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    logging.getLogger("vllm").setLevel(level.upper())  # for what it says before it reads that
    # Here, because it imports vLLM, and the other commands answer without it.
    from vllm_kvselect.engine.doctor import examine

    obstacles = []
    for finding in examine(model):
        _show(finding.subject, finding.text)
        if finding.stops:
            obstacles.append(finding.subject)
    if obstacles:
        _show("verdict", f"nothing can be served with eviction; see {', '.join(obstacles)}")
        raise typer.Exit(1)
    _show("verdict", "requests can be served with eviction")


def _show(subject: str, text: str) -> None:
    typer.echo(f"{subject:<14} {text}")
