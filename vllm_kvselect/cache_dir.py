"""Where the package keeps what it makes or downloads for a user."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """Returns the folder in the user's cache, by the XDG base directory specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative path.
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return root / "vllm-kvselect"
