"""Environments of peers: each has its own packages, pinned, apart from the project's."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from rich.console import Console

from vllm_kvselect.cache_dir import default_cache_dir
from vllm_kvselect.evaluation.server import tail
from vllm_kvselect.offline.errors import EvaluationError


@dataclass(frozen=True)
class Environment:
    """What is installed for a peer.

    Attributes:
        name: Folder in the user's cache.
        packages: Packages with their versions.
        bare: Packages that are installed without what they ask for.
    """

    name: str
    packages: tuple[str, ...]
    bare: tuple[str, ...] = ()

    @property
    def pinned(self) -> tuple[str, ...]:
        """All packages with their versions."""
        return self.packages + self.bare


def make_environment(environment: Environment, folder: Path | None = None) -> Path:
    """Returns an environment's folder; it is made on first use and when a version has changed.

    Args:
        environment: What is installed.
        folder: Where; None for a folder in the user's cache.

    Returns:
        The folder of the virtual environment.

    Raises:
        EvaluationError: If pip cannot install a package; the message holds the end of its log.
    """
    folder = (folder or default_cache_dir() / "peers" / environment.name).absolute()
    wanted = "\n".join(environment.pinned)
    made = folder / "made-with.txt"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if made.is_file() and made.read_text() == wanted:
            return folder
        with Console(stderr=True).status(f"making {folder}, which takes a few minutes, once"):
            run_command(sys.executable, "-m", "venv", "--clear", folder)
            _install(folder, *environment.packages)
            if environment.bare:
                _install(folder, "--no-deps", *environment.bare)
        made.write_text(wanted)
    return folder


def python_of(folder: Path) -> Path:
    """The interpreter of a virtual environment."""
    return folder / "bin" / "python"


def run_command(*words: str | Path) -> None:
    """Runs a command to its end.

    Raises:
        EvaluationError: If it fails; the message holds the end of what it printed.
    """
    command = list(map(str, words))
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode != 0:
        raise EvaluationError(f"{' '.join(command)} failed; it ends:\n{tail(result.stdout)}")


def _install(folder: Path, *arguments: str) -> None:
    pip = (python_of(folder), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run_command(*pip, *arguments)
