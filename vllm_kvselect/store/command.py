"""The command `vllm-kvselect contexts`: lists, verifies and removes what servers have stored."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_kvselect.config import ConfigError
from vllm_kvselect.store.file import Facts, FileError, read_facts
from vllm_kvselect.store.folder import Entry, Folder, reason

_SHORT = 12
"""Digits of a name that are shown."""


def contexts(
    folder: Annotated[Path, typer.Argument(help="Folder of --kv-eviction-context-store.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file whole; status 1 if one is damaged.")
    ] = False,
    remove: Annotated[
        list[str] | None, typer.Option(help="Remove the contexts whose names begin so.")
    ] = None,
    remove_damaged: Annotated[
        bool, typer.Option("--remove-damaged", help="Verify, and remove what is damaged.")
    ] = False,
    remove_all: Annotated[bool, typer.Option("--remove-all", help="Remove all contexts.")] = False,
) -> None:
    """List, verify and remove the compressed contexts that servers stored in a folder."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    stored = Folder(folder)
    entries = sorted(stored.entries(), key=lambda entry: entry.place)
    is_verified = verify or remove_damaged
    problems = {entry.path: _problem(stored, entry, is_verified) for entry in entries}
    gone = [
        entry
        for entry in entries
        if remove_all
        or (remove_damaged and problems[entry.path])
        or any(prefix and entry.place.name.startswith(prefix) for prefix in remove or ())
    ]
    try:
        num_removed = stored.remove(gone)
    except OSError as error:
        raise ConfigError(f"cannot remove from {folder}: {reason(error)}") from None
    left = [entry for entry in entries if entry not in gone]
    console = Console()
    console.print(_table(left, problems, is_verified))
    console.print(f"{len(left)} files, {sum(entry.num_bytes for entry in left) / 2**20:.1f} MiB")
    if gone:
        console.print(f"{num_removed} files removed")
    if verify and any(problems[entry.path] for entry in left):
        raise typer.Exit(1)


def _problem(folder: Folder, entry: Entry, whole: bool) -> str:
    """What is wrong with a file, by all of it or by its header; empty if nothing is."""
    if whole:
        return folder.problem(entry.place) or ""
    facts = _facts(entry)
    return facts if isinstance(facts, str) else ""


def _facts(entry: Entry) -> Facts | str:
    try:
        return read_facts(entry.path)
    except (FileError, OSError) as error:
        return reason(error)


def _table(entries: Sequence[Entry], problems: dict[Path, str], is_verified: bool) -> Table:
    table = Table(box=None)
    for column in ("context", "rank", "model", "method"):
        table.add_column(column)
    for column in ("tokens", "blocks", "MiB", "used"):
        table.add_column(column, justify="right")
    table.add_column("state", overflow="fold")
    for entry in entries:
        facts, place = _facts(entry), entry.place
        known = ["?"] * 4
        if isinstance(facts, Facts):
            known = [facts.model, facts.method, str(facts.num_tokens), str(facts.num_blocks)]
        state = problems[entry.path] or ("verified" if is_verified else "")
        size, rank = f"{entry.num_bytes / 2**20:.1f}", f"{place.rank} of {place.num_ranks}"
        table.add_row(place.name[:_SHORT], rank, *known, size, _ago(entry.used), state)
    return table


def _ago(seconds: float) -> str:
    """How long ago something was."""
    left = max(0.0, time.time() - seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if left >= length:
            return f"{left / length:.0f} {unit} ago"
    return f"{left:.0f} s ago"
