"""What a calibration has done so far, in a file beside its result: it may end at any time."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open

from vllm_kvselect.probes.file import write

_OF: Final = "of"


@dataclass(frozen=True)
class Checkpoint:
    """A calibration's progress, in a file.

    It is known by a digest of all that decides the result: that of another calibration is not
    found.
    """

    path: Path
    of: str

    @classmethod
    def beside(cls, result: Path, *decides: Any) -> Self:
        """The progress of what will be in a file, by all that decides it, as JSON takes it."""
        digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()
        return cls(result.with_name(f".{result.name}.begun"), digest)

    def read(self) -> dict[str, torch.Tensor]:
        """What was kept, by name; empty where nothing was, or by a calibration of another kind."""
        try:
            with safe_open(self.path, framework="pt") as file:
                if (file.metadata() or {}).get(_OF) != self.of:
                    return {}
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return {}

    def keep(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Puts these in place of what was kept, all of them or none.

        Raises:
            ConfigError: If they cannot be written.
        """
        write(tensors, self.path, {_OF: self.of})

    def remove(self) -> None:
        """Removes the file: the calibration is done."""
        self.path.unlink(missing_ok=True)
