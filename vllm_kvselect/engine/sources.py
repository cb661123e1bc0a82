"""The sources of vLLM that hooks were written for, by release, and the refusal of others."""

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import vllm

RELEASES = ("0.32.0", "0.33.0")
"""Releases of vLLM that the hooks were written for."""

KNOWN_SOURCES = {
    "AsyncLLM.generate": ("5bd0ee90459b0e29", "f8205b7b520cf747"),
    "AsyncLLM.add_request": ("ec36c4501b3260fe", "ec36c4501b3260fe"),
    "BaseServing._check_model": ("5a2f4707ffb7f367", "5a2f4707ffb7f367"),
    "BaseServing.__init__": ("d5a8db4404bf6927", "d5a8db4404bf6927"),
    "BeamSearchOfflineMixin.beam_search": ("b4b93229fd76b6a8", "b26ce80f21700f36"),
    "BeamSearchOnlineMixin.beam_search": ("e2e6d1893a8f2c1d", "9944b62f623cd7d3"),
    "LLMEngine.add_request": ("155a97cc606d46ca", "155a97cc606d46ca"),
    "StatLoggerManager.__init__": ("6e75cf036af8369b", "6e75cf036af8369b"),
    "EngineArgs.from_cli_args": ("51a013f61829ac5c", "51a013f61829ac5c"),
    "KVCacheManager.get_computed_blocks": ("77f434d88d573bfe", "ae0e67c0720ab760"),
    "UnitaryKVCacheCoordinator.find_longest_cache_hit": ("3b3bfd695ba86156", "f431d3ea69db04aa"),
    "HybridKVCacheCoordinator.find_longest_cache_hit": ("0d109ac725cf33e2", "0d109ac725cf33e2"),
}
"""SHA-256, first 16 digits, of the vLLM functions that the hooks rely on, in these releases."""


def source_digest(function: Callable[..., Any]) -> str:
    """Identifies a function's source."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def unknown_vllm(unknown: list[str]) -> str:
    """Says that this vLLM is not one the hooks were written for, and what to do."""
    return (
        f"vLLM {vllm.__version__} is not known to this release of vllm-kvselect "
        f"({', '.join(unknown)} changed); install vLLM {' or '.join(RELEASES)}, or serve "
        "without --kv-eviction"
    )
