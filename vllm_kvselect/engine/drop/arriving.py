"""Numbers on their way from a device to the host, which does not wait for them."""

from typing import NamedTuple

import torch


class Arriving(NamedTuple):
    """A whole number that a device computes, copied to the host as soon as it is there.

    Who reads it long afterwards waits for nothing. Read at once, it waits for what was launched
    before the copy, and for nothing behind.

    Attributes:
        on_host: Where numbers that arrive together will be, `[n]`.
        place: This one's place there.
        are_there: What happens once they are there; None where they are already.
    """

    on_host: torch.Tensor
    place: int
    are_there: torch.cuda.Event | None

    @classmethod
    def each(cls, numbers: torch.Tensor) -> "list[Arriving]":
        """Sends numbers off together, `[n]`."""
        # Into pinned memory, which is what makes it a copy that nobody waits for.
        on_host, are_there = numbers.to("cpu", non_blocking=True), None
        if numbers.is_cuda:
            are_there = torch.cuda.Event()
            are_there.record()
        return [cls(on_host, place, are_there) for place in range(len(numbers))]

    def __int__(self) -> int:
        if self.are_there is not None:
            self.are_there.synchronize()
        return int(self.on_host.numpy()[self.place])
