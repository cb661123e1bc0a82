"""Times calls on the device."""

import statistics
from collections.abc import Callable

import torch
from _device import DEVICE, HAS_CARD, host_time

SECONDS_QUEUED = 0.002
"""The device waits this long while the launches of a call are queued behind it."""
CYCLES = 2_000_000_000
"""Of a device in a second, about."""


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy that no cache holds."""
    num_bytes = 2**30 if HAS_CARD else 2**20
    source = torch.ones(num_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_time(lambda: target.copy_(source), 9)


def matrix_rate() -> float:
    """Operations per second of a large product in bfloat16."""
    size = 8192 if HAS_CARD else 128
    left, right = torch.randn(2, size, size, device=DEVICE)
    if HAS_CARD:
        left, right = left.bfloat16(), right.bfloat16()
    return 2 * size**3 / median_time(lambda: left @ right, 9)


def median_time(
    run: Callable[[], object],
    rounds: int,
    guarded: bool = False,
    prepare: Callable[[], object] = lambda: None,
    seconds_queued: float = 0.0,
) -> float:
    """Median seconds of a call on the device, with a cold cache.

    Args:
        run: The call.
        rounds: How often it is timed, after a first call that compiles kernels.
        guarded: Whether it fails if the call waits for the device.
        prepare: What comes before each call, and is not timed.
        seconds_queued: What the host takes for the launches, if that is long.
    """
    prepare()
    run()
    if not HAS_CARD:
        return host_time(run, rounds, prepare)
    flush, times = torch.empty(2**26, device="cuda"), []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        prepare()
        flush.zero_()
        # Launches are queued before the device is free, so that their own time does not show.
        torch.cuda._sleep(int(max(SECONDS_QUEUED, seconds_queued) * CYCLES))
        torch.cuda.set_sync_debug_mode("error" if guarded else "default")
        start.record()
        run()
        end.record()
        torch.cuda.set_sync_debug_mode("default")
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
