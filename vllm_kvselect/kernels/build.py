"""Finds the compiled library of `kernels/cpu/`, or compiles it, whoever else does so too.

The library is one file in torch's folder for extensions. Whoever finds it complete loads it: that
needs neither a compiler nor ninja nor a folder that can be written. It is built in a folder beside
it and moved to its name when it is complete. A lock of the operating system, which ends with the
process that holds it, keeps two processes from building at once.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import torch
from filelock import FileLock

_SOURCE = Path(__file__).parent / "cpu" / "library.cpp"
_FLAGS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
}
"""Instructions that each of torch's capabilities stands for: those it compiles itself with.

Not `-march=native`: the library's name tells all that it needs of a processor, so that one in a
shared home or in a copied image is never loaded by a processor that lacks something."""


class KernelError(RuntimeError):
    """The kernels cannot be used on this machine: says why and what to do."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"the CPU kernels are not available: {reason}; {remedy}")


def load_library() -> None:
    """Makes the operators `torch.ops.vllm_kvselect` known; compiling them takes about 25 s.

    Raises:
        KernelError: If they can be neither found nor compiled, or not loaded.
    """
    library = library_path()
    if not library.exists():
        build(library)
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise KernelError(f"{library} cannot be loaded ({error})", "delete it") from error


def library_path() -> Path:
    """Returns the file that this machine loads, there or not.

    Only the same sources on the same torch, Python and instruction set share its name.

    Raises:
        KernelError: If the kernels are not made for this processor.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _FLAGS:
        made_for = "they are made for x86-64 processors with AVX2 or AVX-512"
        raise KernelError(made_for, f"PyTorch finds {capability!r} here, so nothing can be done")
    digest = sha256(repr(_FLAGS[capability]).encode())
    for source in sorted(_SOURCE.parent.iterdir()):
        digest.update(source.read_bytes())
    release = torch.__version__.replace(".", "_").replace("+", "_")
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    parts = ("vllm_kvselect", digest.hexdigest()[:12], capability.lower(), python, "torch", release)
    return _root() / ("_".join(parts) + ".so")


def build(library: Path) -> None:
    """Compiles the library, or waits for the process that does.

    Raises:
        KernelError: If something is missing, the folder cannot be written or compiling fails.
    """
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(library.with_suffix(".lock")):
            if not library.exists():
                _compile(library)
    except OSError as error:
        remedy = "set TORCH_EXTENSIONS_DIR to a folder that you may write"
        raise KernelError(f"{library.parent} cannot be written ({error})", remedy) from error


def _compile(library: Path) -> None:
    from torch.utils import cpp_extension

    capability = torch.backends.cpu.get_cpu_capability()
    macros = (f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}")
    # What a killed process left behind, torch's own guard included, must not be waited for.
    folder = library.with_suffix(".build")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with _own_programs_first():
        _require_programs()
        try:
            cpp_extension.load(
                library.stem,
                [str(_SOURCE)],
                extra_cflags=["-O3", "-fopenmp", *_FLAGS[capability], *macros],
                build_directory=str(folder),
                is_python_module=False,
            )
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            remedy = "try another version of g++"
            raise KernelError(f"compiling them fails ({_first_error(error)})", remedy) from error
    (folder / library.name).replace(library)
    shutil.rmtree(folder, ignore_errors=True)


def _require_programs() -> None:
    from torch.utils import cpp_extension

    compiler: str = cpp_extension.get_cxx_compiler()  # type: ignore[no-untyped-call]
    if shutil.which(compiler) is None:
        raise KernelError(f"there is no C++ compiler ({compiler})", "install g++")
    if not cpp_extension.is_ninja_available():
        raise KernelError("ninja is missing", "install it (pip install ninja)")


@contextmanager
def _own_programs_first() -> Iterator[None]:
    """ninja stands beside this Python; without the environment activated it is not found there."""
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), before))
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _first_error(error: Exception) -> str:
    """The compiler's first complaint, out of all that ninja printed."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if "error:" in line), lines[0])


def _root() -> Path:
    """The folder in which torch keeps what it compiled."""
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        raise KernelError(f"{error.name} is missing", "install it with pip") from error

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
