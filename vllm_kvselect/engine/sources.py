"""The sources of vLLM that hooks were written for, by release, and the refusal of others."""

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import vllm

KNOWN_SOURCES = {
    "AsyncLLM.generate": {"0.32.0": "5bd0ee90459b0e29", "0.33.0": "f8205b7b520cf747"},
    "AsyncLLM.add_request": {"0.32.0": "ec36c4501b3260fe", "0.33.0": "ec36c4501b3260fe"},
    "BaseServing._check_model": {"0.32.0": "5a2f4707ffb7f367", "0.33.0": "5a2f4707ffb7f367"},
    "BaseServing.__init__": {"0.32.0": "d5a8db4404bf6927", "0.33.0": "d5a8db4404bf6927"},
    "BeamSearchOfflineMixin.beam_search": {
        "0.32.0": "b4b93229fd76b6a8",
        "0.33.0": "b26ce80f21700f36",
    },
    "BeamSearchOnlineMixin.beam_search": {
        "0.32.0": "e2e6d1893a8f2c1d",
        "0.33.0": "9944b62f623cd7d3",
    },
    "LLMEngine.add_request": {"0.32.0": "155a97cc606d46ca", "0.33.0": "155a97cc606d46ca"},
    "StatLoggerManager.__init__": {"0.32.0": "6e75cf036af8369b", "0.33.0": "6e75cf036af8369b"},
    "EngineArgs.from_cli_args": {"0.32.0": "51a013f61829ac5c", "0.33.0": "51a013f61829ac5c"},
    "KVCacheManager.get_computed_blocks": {
        "0.32.0": "77f434d88d573bfe",
        "0.33.0": "ae0e67c0720ab760",
    },
    "UnitaryKVCacheCoordinator.find_longest_cache_hit": {
        "0.32.0": "3b3bfd695ba86156",
        "0.33.0": "f431d3ea69db04aa",
    },
    "HybridKVCacheCoordinator.find_longest_cache_hit": {
        "0.32.0": "0d109ac725cf33e2",
        "0.33.0": "0d109ac725cf33e2",
    },
}
"""SHA-256, first 16 digits, of the vLLM functions that the hooks rely on, by release."""


def source_digest(function: Callable[..., Any]) -> str:
    """Identifies a function's source."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def known_releases() -> list[str]:
    """Releases of vLLM that the hooks were written for."""
    return sorted({release for releases in KNOWN_SOURCES.values() for release in releases})


def unknown_vllm(unknown: list[str]) -> str:
    """Says that this vLLM is not one the hooks were written for, and what to do."""
    return (
        f"vLLM {vllm.__version__} is not known to this release of vllm-kvselect "
        f"({', '.join(unknown)} changed); install vLLM {' or '.join(known_releases())}, or serve "
        "without --kv-eviction"
    )
