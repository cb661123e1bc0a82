"""Settings of the whole suite: one thread per process, since two test processes share two cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
