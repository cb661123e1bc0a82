"""A fingerprint of a model's weights, by which a probe of other weights is told."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from vllm_kvselect.config import ConfigError

_NUM_TENSORS = 16
_NUM_ROWS = 64
"""Of each of them: the fingerprint of a large model takes no longer than that of a small one."""

_NUM_SAMPLED = 4
"""Rows of each place of a tensor that the full fingerprint looks at."""


def fingerprint(
    model: str, revision: str | None = None, download_dir: str | Path | None = None
) -> str:
    """A hash of the first rows of a few tensors, spread over the whole model: SHA-256, hexadecimal.

    Of the files of a model that is on this machine, not of what is made of them: data type and
    sharding of a process are its own. Without `download_dir` it is looked for in the hub's own
    cache.

    Raises:
        ConfigError: If there are no safetensors files.
    """
    shards = _shards(model, revision, download_dir)
    names = sorted(shards)
    step = max(1, len(names) // _NUM_TENSORS)
    digest = hashlib.sha256()
    for name in names[::step]:
        with safe_open(shards[name], framework="pt") as file:
            tensor = file.get_slice(name)
            digest.update(f"{name} {tensor.get_dtype()} {tensor.get_shape()}".encode())
            # A scalar has no rows.
            rows = tensor[:_NUM_ROWS] if tensor.get_shape() else file.get_tensor(name)
        digest.update(rows.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def full_fingerprint(
    model: str, revision: str | None = None, download_dir: str | Path | None = None
) -> str:
    """A hash of some rows of *every* tensor, so that no layer may be another's.

    `fingerprint` would miss a fine-tuned layer between those that it looks at. A folder of contexts
    must not: what a layer computed with other weights would be read. Arguments are as of
    `fingerprint`.

    Raises:
        ConfigError: If there are no safetensors files.
    """
    digest = hashlib.sha256()
    by_file: dict[Path, list[str]] = {}
    for name, path in sorted(_shards(model, revision, download_dir).items()):
        by_file.setdefault(path, []).append(name)
    found = []
    for path, names in by_file.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                found.append((name, _sample(file, name)))
    for name, of_tensor in sorted(found):
        digest.update(f"{name} {of_tensor}".encode())
    return digest.hexdigest()


def _sample(file: Any, name: str) -> str:
    """A hash of a tensor's shape, and of its first, middle and last rows."""
    tensor = file.get_slice(name)
    shape = tensor.get_shape()
    digest = hashlib.sha256(f"{tensor.get_dtype()} {shape}".encode())
    if len(shape) > 1:
        starts = (0, shape[0] // 2, max(0, shape[0] - _NUM_SAMPLED))
        parts = [tensor[start : start + _NUM_SAMPLED] for start in starts]
    else:
        parts = [file.get_tensor(name)]
    for part in parts:
        digest.update(part.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _shards(model: str, revision: str | None, download_dir: str | Path | None) -> dict[str, Path]:
    """The file of each tensor."""
    folder = _folder(model, revision, download_dir)
    shards = {}
    for path in sorted(folder.glob("*.safetensors")) if folder else ():
        with safe_open(path, framework="pt") as file:
            shards.update(dict.fromkeys(file.keys(), path))
    if not shards:
        raise ConfigError(
            f"{model} has no .safetensors files on this machine, by which its weights are known; "
            "save it as such with transformers' save_pretrained"
        )
    return shards


def _folder(model: str, revision: str | None, download_dir: str | Path | None) -> Path | None:
    """Where the weights are; the network is not asked."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            local_files_only=True,
            allow_patterns="*.safetensors",
        )
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    return Path(found)
