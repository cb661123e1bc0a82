"""The two places where vLLM has no public extension point, one function each.

Each has a matching diff in `patches/` in the form it would be sent upstream. What a hook replaces
is compared with the source it was written for; where it differs, eviction is refused.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_manager import KVCacheManager

from vllm_kvselect.config import ConfigError

KNOWN_SOURCES = {
    "EngineArgs.from_cli_args": {"0.32.0": "51a013f61829ac5c", "0.33.0": "51a013f61829ac5c"},
    "KVCacheManager.get_computed_blocks": {
        "0.32.0": "77f434d88d573bfe",
        "0.33.0": "ae0e67c0720ab760",
    },
    "KVCacheManager.truncate_computed_blocks": {
        "0.32.0": "fbf506da812a2db7",
        "0.33.0": "fbf506da812a2db7",
    },
}
"""SHA-256, first 16 digits, of the vLLM functions that the hooks rely on, by release."""


def install() -> None:
    """Installs every hook once per process; all of them are stock without eviction."""
    if getattr(EngineArgs.create_engine_config, "is_kvselect_hook", False):
        return
    unknown = unknown_sources()
    hook_arguments(unknown)
    if not unknown:
        hook_cache_hits()


def unknown_sources() -> list[str]:
    """Names of the functions whose source is not what the hooks were written for."""
    functions: list[Callable[..., Any]] = [
        EngineArgs.from_cli_args,
        KVCacheManager.get_computed_blocks,
        KVCacheManager.truncate_computed_blocks,
    ]
    return [
        function.__qualname__
        for function in functions
        if source_digest(function) not in KNOWN_SOURCES[function.__qualname__].values()
    ]


def source_digest(function: Callable[..., Any]) -> str:
    """Identifies a function's source."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def hook_arguments(unknown: list[str]) -> None:
    """Adds the `--kv-eviction*` options and applies them (patches/0001).

    Plugins are loaded before vLLM fills its parser, but it offers them no way to extend it, nor to
    take part when its configuration is made.

    Args:
        unknown: Functions of an unknown vLLM; eviction is then refused when asked for.
    """
    add_cli_args, from_cli_args = EngineArgs.add_cli_args, EngineArgs.from_cli_args.__func__
    create_engine_config = EngineArgs.create_engine_config

    @functools.wraps(add_cli_args)
    def add_cli_args_hook(parser: Any) -> Any:
        from vllm_kvselect.engine import arguments

        parser = add_cli_args(parser)
        arguments.add_cli_args(parser)
        return parser

    @functools.wraps(from_cli_args)
    def from_cli_args_hook(cls: type[EngineArgs], args: Any) -> EngineArgs:
        from vllm_kvselect.engine import arguments

        engine_args = from_cli_args(cls, args)
        arguments.from_cli_args(engine_args, args)
        return engine_args

    @functools.wraps(create_engine_config)
    def create_engine_config_hook(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        from vllm_kvselect.engine import arguments

        if unknown and arguments.requested(self) is not None:
            raise ConfigError(unknown_vllm(unknown))
        arguments.before_engine_config(self)
        vllm_config = create_engine_config(self, *args, **kwargs)
        arguments.after_engine_config(self, vllm_config)
        return vllm_config

    create_engine_config_hook.is_kvselect_hook = True  # type: ignore[attr-defined]
    EngineArgs.add_cli_args = staticmethod(add_cli_args_hook)
    EngineArgs.from_cli_args = classmethod(from_cli_args_hook)
    EngineArgs.create_engine_config = create_engine_config_hook


def unknown_vllm(unknown: list[str]) -> str:
    """Says that this vLLM is not one the hooks were written for, and what to do."""
    known = sorted({release for releases in KNOWN_SOURCES.values() for release in releases})
    return (
        f"vLLM {vllm.__version__} is not known to this release of vllm-kvselect "
        f"({', '.join(unknown)} changed); install vLLM {' or '.join(known)}, or serve without "
        "--kv-eviction"
    )


def hook_cache_hits() -> None:
    """Caps prefix-cache hits where packed blocks begin (patches/0002).

    A block manager decides what is hashed, but not how far a request may be served from the cache.
    """
    get_computed_blocks = KVCacheManager.get_computed_blocks

    @functools.wraps(get_computed_blocks)
    def get_computed_blocks_hook(
        self: KVCacheManager, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        blocks, num_tokens, boundary = get_computed_blocks(self, request, *args, **kwargs)
        for manager in self.coordinator.single_type_managers:
            max_cache_hit_tokens = getattr(manager, "max_cache_hit_tokens", None)
            if max_cache_hit_tokens is None:
                continue
            if num_tokens > (cap := max_cache_hit_tokens(request)):
                blocks, num_tokens = self.truncate_computed_blocks(blocks, cap), cap
        return blocks, num_tokens, boundary

    KVCacheManager.get_computed_blocks = get_computed_blocks_hook
