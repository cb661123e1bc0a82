"""Compiles the C++ sources of `kernels/cpu/`, or finds them compiled, whoever else does so too.

torch keeps what it compiled in one folder for all installations of a machine, and guards a build
with a file that it removes at the end. A process killed meanwhile leaves that file behind, and
everyone who needs the same build would wait for it for ever. Here a lock of the operating system,
which ends with the process that holds it, says whether anyone is still building.
"""

import os
import sys
from hashlib import sha256
from pathlib import Path

import torch
from filelock import FileLock

_SOURCE = Path(__file__).parent / "cpu" / "library.cpp"


def load_library() -> None:
    """Makes the operators `torch.ops.vllm_kvselect` known; compiling them takes about 25 s.

    Raises:
        ImportError: If setuptools is missing.
        OSError: If the folder cannot be written or the library cannot be loaded.
        RuntimeError: If there is no compiler or ninja, or compiling fails.
        subprocess.SubprocessError: If the compiler does not answer.
    """
    # Imports setuptools: not before it is needed.
    from torch.utils import cpp_extension

    capability = torch.backends.cpu.get_cpu_capability()
    flags = ["-O3", "-march=native", "-fopenmp", f"-DCPU_CAPABILITY={capability}"]
    if capability != "DEFAULT":
        flags.append(f"-DCPU_CAPABILITY_{capability}")
    name = build_name(capability)
    folder = build_root() / name
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        # We alone build here, so torch's own guard can only be left over.
        (folder / "lock").unlink(missing_ok=True)
        cpp_extension.load(
            name,
            [str(_SOURCE)],
            extra_cflags=flags,
            build_directory=str(folder),
            is_python_module=False,
        )


def build_root() -> Path:
    """Returns the folder in which torch keeps what it compiled."""
    from torch.utils import cpp_extension

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())


def build_name(capability: str) -> str:
    """Returns a name that only the same sources on the same torch, Python and machine share.

    Args:
        capability: Of the processor, in torch's words: "AVX512".
    """
    digest = sha256()
    for source in sorted(_SOURCE.parent.iterdir()):
        digest.update(source.read_bytes())
    release = torch.__version__.replace(".", "_").replace("+", "_")
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    parts = ("vllm_kvselect", digest.hexdigest()[:12], capability.lower(), python, "torch", release)
    return "_".join(parts)
