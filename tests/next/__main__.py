"""Runs what needs no compiled code under a newer release of vLLM than the one installed.

`python -m tests.next` fetches the release's wheel from the package index that pip uses, unpacks its
Python beside the environment, and runs pytest with it in front of the installed one. torch and all
else are the environment's. What follows the options goes to pytest.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

RELEASE = "0.33.0"
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".next" / f"vllm-{RELEASE}" / "site-packages"
"""Named so that Hypothesis takes no constants from it, which would change what it draws."""

NO_PYTHON = {".a", ".cu", ".cuh", ".h", ".hpp", ".inl", ".so"}
"""Endings of what is not unpacked: nothing here could load it, and it is most of the wheel."""

PLUGIN = "tests.next.plugin"
TESTS = ("tests/engine", "tests/test_docs.py")
"""Nothing else imports vLLM, which `tests/test_imports.py` checks."""


class NoWheelError(Exception):
    """The wheel cannot be had, with pip's reason."""


def main() -> int:
    """Fetches the wheel unless it is there, then runs pytest.

    Returns:
        pytest's status; 1 if the wheel cannot be had, or 0 if that is no error here.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.next", description=__doc__)
    parser.add_argument("--if-available", action="store_true", help="no wheel is no error")
    options, for_pytest = parser.parse_known_args()
    try:
        if not FOLDER.is_dir():
            unpack()
    except NoWheelError as error:
        say(f"nothing was run: vLLM {RELEASE} cannot be had here: {error}")
        return 0 if options.if_available else 1
    say(f"vLLM {RELEASE} from {FOLDER.relative_to(ROOT)}")
    paths = [str(FOLDER), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, *for_pytest]
    if not any((ROOT / each.partition("::")[0]).exists() for each in for_pytest):
        command += TESTS
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def say(message: str) -> None:
    """Prints a line of our own."""
    sys.stderr.write(f"test-next: {message}\n")


def unpack() -> None:
    """Downloads the wheel and unpacks its Python into `FOLDER`, all of it or nothing.

    Raises:
        NoWheelError: If pip cannot download it.
    """
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
        say(f"downloading the wheel of vLLM {RELEASE}, some 340 MB")
        wheel = download(Path(folder))
        unpacked = Path(folder) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if Path(n).suffix not in NO_PYTHON]
            archive.extractall(unpacked, [n for n in names if not n.endswith("/vllm-rs")])
        name_as_cpu_build(unpacked)
        shutil.move(unpacked, FOLDER)


def download(folder: Path) -> Path:
    """Has pip download the wheel without what it depends on.

    Raises:
        NoWheelError: If it cannot.
    """
    arguments = ["--no-deps", "--only-binary=:all:", "--retries=1", "--quiet"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *arguments]
    result = subprocess.run(
        [*command, "--dest", str(folder), f"vllm=={RELEASE}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise NoWheelError((result.stderr.strip().splitlines() or ["pip gave no reason"])[-1])
    (wheel,) = folder.glob("*.whl")
    return wheel


def name_as_cpu_build(unpacked: Path) -> None:
    """Gives the release the version of a CPU build.

    vLLM recognises its CPU platform by "cpu" in its version; without it, and without a GPU, it
    finds no platform at all. Its Python is the same in both builds.
    """
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    named = text.replace(f"\nVersion: {RELEASE}\n", f"\nVersion: {RELEASE}+cpu\n", 1)
    assert named != text
    metadata.write_text(named, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
