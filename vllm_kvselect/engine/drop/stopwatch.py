"""Stopwatches: how long selection takes, on the host or on a device that is not waited for."""

import time
from collections import deque
from typing import Self

import torch


class HostStopwatch:
    """Adds up the seconds spent inside `with stopwatch:`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Starts again from zero."""
        self.seconds = self._started = 0.0

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started


class DeviceStopwatch:
    """The same for what is launched inside: seconds count once the device has passed them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Starts again from zero; what the device has not passed yet is forgotten."""
        self._seconds = 0.0
        self._open = deque[tuple[torch.cuda.Event, torch.cuda.Event]]()

    @property
    def seconds(self) -> float:
        """What is known by now."""
        while self._open and self._open[0][1].query():
            start, end = self._open.popleft()
            self._seconds += start.elapsed_time(end) / 1e3
        return self._seconds

    def __enter__(self) -> Self:
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        self._open.append(events)
        return self

    def __exit__(self, *_: object) -> None:
        self._open[-1][1].record()


def stopwatch(device: torch.device) -> HostStopwatch | DeviceStopwatch:
    """A stopwatch for work on a device."""
    return DeviceStopwatch() if device.type == "cuda" else HostStopwatch()
