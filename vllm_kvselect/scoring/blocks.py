"""How much of a square is computed at once by scorers that compare a prompt with itself."""

import torch

_ELEMENTS = 2**22
"""On a processor 16 MiB in float32, which its caches hold in part."""

_ELEMENTS_ON_DEVICE = 2**26
"""On a device 256 MiB: each block is a dozen launches, which smaller ones do not fill."""


def block_elements(device: torch.device) -> int:
    """Elements of a block that is alive at once: memory does not grow with the prompt."""
    return _ELEMENTS if device.type == "cpu" else _ELEMENTS_ON_DEVICE
