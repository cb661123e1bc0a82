"""Numbers on their way from a device to the host, which does not wait for them."""

import torch


class Arriving:
    """A whole number that a device computes, copied to the host as soon as it is there.

    Who reads it long afterwards waits for nothing. Read at once, it waits for what was launched
    before the copy, and for nothing behind.

    Args:
        number: The number, a tensor with one element.
    """

    def __init__(self, number: torch.Tensor) -> None:
        # Into pinned memory, which is what makes it a copy that nobody waits for.
        self.on_host = number.to("cpu", non_blocking=True)
        self._is_there: torch.cuda.Event | None = None
        if number.is_cuda:
            self._is_there = torch.cuda.Event()
            self._is_there.record()

    def __int__(self) -> int:
        if self._is_there is not None:
            self._is_there.synchronize()
        return int(self.on_host.numpy())
