"""Numbers that the host knows and a device needs."""

from collections.abc import Sequence

import numpy as np
import torch


def on_device(numbers: np.ndarray | Sequence[int], device: torch.device) -> torch.Tensor:
    """Copies a few numbers to where they are needed; nobody waits for the device.

    Returns:
        Shaped as they are, of their type; `[n]` int64 for a sequence.
    """
    is_array = isinstance(numbers, np.ndarray)
    on_host = torch.from_numpy(numbers if is_array else np.array(numbers, dtype=np.int64))
    if device.type == "cuda":
        on_host = on_host.pin_memory()  # a copy from other memory waits
    return on_host.to(device, non_blocking=True)
