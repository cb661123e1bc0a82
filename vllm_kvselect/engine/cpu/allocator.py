"""How this process's C library handles freed memory.

A forward pass on CPU takes and frees megabytes in every layer. By default glibc returns much of it
to the kernel each time, which hands it out again page by page, zeroed: up to 100,000 page faults in
a prefill of 1,024 tokens, a third of its time. How many depends on what else is allocated in
between, and selection is such a thing, so it cost more than its own time. vLLM recommends tcmalloc
for that reason; this does what is needed for those who do not preload it.
"""

import ctypes
import os

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MIB = 2**20


def keep_freed_memory() -> bool:
    """Asks glibc to keep freed memory, up to 2 GiB, for what is allocated next.

    Returns:
        Whether it was asked: not if the user chose its thresholds, or this is another library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    chosen = {"GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}
    if mallopt is None or chosen & os.environ.keys():
        return False
    mallopt(_M_MMAP_THRESHOLD, 1024 * _MIB)
    mallopt(_M_TRIM_THRESHOLD, 2048 * _MIB - 1)
    mallopt(_M_TOP_PAD, 64 * _MIB)
    return True
