"""A compressed context in a file: pages and offsets as safetensors, what they are as its metadata.

A file is taken only if all of it is what was written: its facts hold a checksum of themselves and
of every tensor. So one that is torn, changed, of another version or another context's is refused.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, ValidationError

if TYPE_CHECKING:
    import torch

VERSION: Final = 1
"""Raised whenever a file of before would be read wrongly. It is part of the contexts' names."""

_FORMAT, _FACTS, _SUM = "vllm-kvselect-context", "facts", "sha256"
_NAME = re.compile(r"(?P<name>[0-9a-f]{64})\.(?P<rank>\d+)of(?P<num_ranks>\d+)\.safetensors")
_LONGEST_HEADER = 2**20
"""Bytes of a header that is looked at: ours have less than a thousand."""


class FileError(Exception):
    """A file that is not taken, and why."""


class Place(NamedTuple):
    """Which file holds what.

    Attributes:
        name: The context's, 64 hexadecimal digits: all that decides what is in it.
        rank: The rank whose heads it has.
        num_ranks: How many there are.
    """

    name: str
    rank: int = 0
    num_ranks: int = 1

    @property
    def file(self) -> str:
        """The file's name in its folder."""
        return f"{self.name}.{self.rank}of{self.num_ranks}.safetensors"

    @classmethod
    def of(cls, file: str) -> Self | None:
        """The place that a file's name says; None for other people's files."""
        found = _NAME.fullmatch(file)
        if found is None:
            return None
        return cls(found["name"], int(found["rank"]), int(found["num_ranks"]))


class Facts(BaseModel):
    """What a file holds: model and method are for people, the name knows all that decides it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = VERSION
    written_by: str
    name: str
    rank: int
    num_ranks: int
    model: str
    method: str
    num_tokens: int
    num_blocks: int

    @property
    def place(self) -> Place:
        """Where it belongs."""
        return Place(self.name, self.rank, self.num_ranks)


class Stored(NamedTuple):
    """A compressed context of one rank.

    Attributes:
        pages: Its blocks from the first packed one up to its end, as bytes in the cache's own
            order, `[num_layers, num_blocks, ...]`.
        offsets: Where the pages of each head start among those of its packed blocks,
            `[num_layers, num_kv_heads + 1]` int32.
        facts: What it is.
    """

    pages: "torch.Tensor"
    offsets: "torch.Tensor"
    facts: Facts

    def write(self, path: Path) -> None:
        """Writes all of it to a new file, down to the disk.

        Raises:
            OSError: If it cannot be written.
        """
        from safetensors.torch import save

        tensors = {"pages": self.pages.contiguous(), "offsets": self.offsets.contiguous()}
        facts = self.facts.model_dump_json()
        metadata = {"format": _FORMAT, _FACTS: facts, _SUM: _checksum(facts, tensors)}
        content = save(tensors, metadata)
        # Nobody but the user who runs the server may read it.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file and verifies all of it.

        Raises:
            FileError: If it is not what was once written for this place.
            OSError: If it cannot be read.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        content = path.read_bytes()
        facts, expected = _described(path, content)
        try:
            tensors = load(content)
        except (SafetensorError, ValueError, KeyError) as error:
            raise FileError(f"it is no whole safetensors file ({error})") from None
        if set(tensors) != {"pages", "offsets"} or _checksum(facts, tensors) != expected:
            raise FileError("its checksum is wrong: it was changed after it was written")
        found = _parsed(facts)
        if found.place.file != path.name:
            raise FileError(f"it holds {found.place.file}")
        return cls(tensors["pages"], tensors["offsets"], found)


def read_facts(path: Path) -> Facts:
    """Reads what a file says it is, from its header alone.

    Raises:
        FileError: If it is no file of ours.
        OSError: If it cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(8)
        content = start + file.read(min(int.from_bytes(start, "little"), _LONGEST_HEADER))
    return _parsed(_described(path, content)[0])


def _described(path: Path, content: bytes) -> tuple[str, str]:
    """The facts of a file as they stand in its header, and the checksum."""
    length = int.from_bytes(content[:8], "little")
    if Place.of(path.name) is None:
        raise FileError("it has no name of ours")
    if not 0 < length <= min(_LONGEST_HEADER, len(content) - 8):
        raise FileError("it is no whole safetensors file (no header)")
    try:
        header = json.loads(content[8 : 8 + length])
        metadata = header["__metadata__"]
        kind, facts, expected = (metadata[key] for key in ("format", _FACTS, _SUM))
    except (ValueError, KeyError, TypeError):
        raise FileError("it is no context of ours") from None
    if kind != _FORMAT:
        raise FileError("it is no context of ours")
    return facts, expected


def _parsed(facts: str) -> Facts:
    try:
        return Facts.model_validate_json(facts)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise FileError(f"it is of another version ({place}: {problem['msg']})") from None


def _checksum(facts: str, tensors: Mapping[str, "torch.Tensor"]) -> str:
    import torch

    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
