"""The six places where vLLM has no public extension point, one function each.

Each has a matching diff in `patches/` in the form it would be sent upstream. What a hook replaces
is compared with the source it was written for; where it differs, eviction is refused.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import vllm
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerManager

from vllm_kvselect.config import ConfigError

KNOWN_SOURCES = {
    "AsyncLLM.generate": {"0.32.0": "5bd0ee90459b0e29", "0.33.0": "f8205b7b520cf747"},
    "AsyncLLM.add_request": {"0.32.0": "ec36c4501b3260fe", "0.33.0": "ec36c4501b3260fe"},
    "BaseServing._check_model": {"0.32.0": "5a2f4707ffb7f367", "0.33.0": "5a2f4707ffb7f367"},
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

KNOWN_GRAPH_SOURCES = {
    "CudagraphDispatcher.dispatch": {"0.32.0": "56eabe7548de3714", "0.33.0": "56eabe7548de3714"},
    "CudaGraphManager.dispatch": {"0.32.0": "16099f9929707031", "0.33.0": "16099f9929707031"},
}
"""The same for what only workers on CUDA rely on."""


def install() -> None:
    """Installs every hook once per process; all of them are stock without eviction."""
    if getattr(EngineArgs.create_engine_config, "is_kvselect_hook", False):
        return
    unknown = unknown_sources()
    hook_arguments(unknown)
    if not unknown:
        hook_cache_hits()
        hook_requests()
        hook_bodies()
        hook_stat_loggers()


def unknown_sources() -> list[str]:
    """Names of the functions whose source is not what the hooks were written for."""
    functions: list[Callable[..., Any]] = [
        AsyncLLM.generate,
        AsyncLLM.add_request,
        LLMEngine.add_request,
        BaseServing._check_model,
        StatLoggerManager.__init__,
        EngineArgs.from_cli_args,
        KVCacheManager.get_computed_blocks,
        UnitaryKVCacheCoordinator.find_longest_cache_hit,
        HybridKVCacheCoordinator.find_longest_cache_hit,
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
        from vllm_kvselect.engine.frontend import arguments

        parser = add_cli_args(parser)
        arguments.add_cli_args(parser)
        return parser

    @functools.wraps(from_cli_args)
    def from_cli_args_hook(cls: type[EngineArgs], args: Any) -> EngineArgs:
        from vllm_kvselect.engine.frontend import arguments

        engine_args = from_cli_args(cls, args)
        arguments.from_cli_args(engine_args, args)
        return engine_args

    @functools.wraps(create_engine_config)
    def create_engine_config_hook(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        from vllm_kvselect.engine.frontend import arguments

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


def hook_full_graphs(model_runner: Any, is_vetoed: Callable[[], bool]) -> None:
    """Keeps steps of one worker out of graphs that hold a whole step (patches/0005).

    A batch of one token a row may run as such a graph, also where that token completes a prompt;
    vLLM chooses the graph before it builds the metadata.

    Args:
        model_runner: vLLM's, of either version, with its KV cache.
        is_vetoed: Whether the step that is about to run must be seen in Python.

    Raises:
        ConfigError: If this vLLM chooses graphs in a way that is not known.
    """
    manager = getattr(model_runner, "cudagraph_manager", None)
    owner = model_runner.cudagraph_dispatcher if manager is None else manager
    dispatch = owner.dispatch
    if source_digest(dispatch) not in KNOWN_GRAPH_SOURCES.get(dispatch.__qualname__, {}).values():
        raise ConfigError(unknown_vllm([dispatch.__qualname__]))
    signature = inspect.signature(dispatch)

    @functools.wraps(dispatch)
    def dispatch_hook(*args: Any, **kwargs: Any) -> Any:
        if not is_vetoed():
            return dispatch(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        if "uniform_token_count" in given:
            # No graph of a whole step takes a batch that is not uniform.
            return dispatch(**{**given, "uniform_token_count": None, "max_query_len": None})
        invalid = {*(given.get("invalid_modes") or ()), CUDAGraphMode.FULL}
        return dispatch(**{**given, "invalid_modes": invalid})

    owner.dispatch = dispatch_hook


def hook_cache_hits() -> None:
    """Lets our block manager plan a request and cap its prefix-cache hits (patches/0002).

    A block manager decides what is hashed, but not how far a request may be served from the cache;
    and of a request it is later told nothing but the id.
    """
    get_computed_blocks = KVCacheManager.get_computed_blocks

    @functools.wraps(get_computed_blocks)
    def get_computed_blocks_hook(
        self: KVCacheManager, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        blocks, num_tokens, boundary = get_computed_blocks(self, request, *args, **kwargs)
        managers = self.coordinator.single_type_managers
        caps = [manager.admit(request) for manager in managers if hasattr(manager, "admit")]
        if num_tokens > (cap := min(caps, default=num_tokens)):
            # Looked up again, not cut: a sliding window needs other blocks at another end.
            found, num_tokens, _ = self.coordinator.find_longest_cache_hit(
                request.block_hashes, cap
            )
            blocks = self.create_kv_cache_blocks(found)
        return blocks, num_tokens, boundary

    KVCacheManager.get_computed_blocks = get_computed_blocks_hook


def hook_requests() -> None:
    """Checks every request's settings before vLLM takes it (patches/0003).

    `generate` is asked for its first item only after a streamed response has begun with status 200,
    so it is checked when it is called. What the workers must be asked for waits for `add_request`.
    """
    generate, add_request = AsyncLLM.generate, LLMEngine.add_request
    add_request_async = AsyncLLM.add_request

    @functools.wraps(generate)
    def generate_hook(
        self: AsyncLLM, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from vllm_kvselect.engine.frontend import requests

        requests.check_request(self, prompt, sampling_params)
        return generate(self, prompt, sampling_params, *args, **kwargs)

    @functools.wraps(add_request)
    def add_request_hook(
        self: LLMEngine, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from vllm_kvselect.engine.frontend import requests

        requests.check_request(self, prompt, params)
        return add_request(self, request_id, prompt, params, *args, **kwargs)

    @functools.wraps(add_request_async)
    async def add_request_async_hook(
        self: AsyncLLM, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from vllm_kvselect.engine.frontend import requests

        await requests.check_projections(self, prompt, params)
        return await add_request_async(self, request_id, prompt, params, *args, **kwargs)

    AsyncLLM.generate = generate_hook
    AsyncLLM.add_request = add_request_async_hook
    LLMEngine.add_request = add_request_hook


def hook_bodies() -> None:
    """Checks the bodies of HTTP requests for what does not reach the engine (patches/0006).

    vLLM drops fields that it does not know, and for a beam search all of `vllm_xargs`.
    """
    check_model = BaseServing._check_model

    @functools.wraps(check_model)
    async def check_model_hook(self: BaseServing, request: Any) -> Any:
        from vllm_kvselect.engine.frontend import requests

        if (engine := getattr(self, "engine_client", None)) is not None:
            await requests.check_body(engine, request)
        return await check_model(self, request)

    BaseServing._check_model = check_model_hook


def hook_stat_loggers() -> None:
    """Adds our logger wherever vLLM logs statistics of an engine that evicts (patches/0004).

    The public group `vllm.stat_logger_plugins` would switch logging on in every server on which
    the plugin is installed, and it is not read offline.
    """
    init = StatLoggerManager.__init__

    @functools.wraps(init)
    def init_hook(self: StatLoggerManager, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        from vllm_kvselect.engine.frontend import metrics

        init(self, vllm_config, *args, **kwargs)
        # First in the list, because it takes its reports out of what vLLM's own loggers read. Made
        # last, because vLLM's Prometheus logger unregisters every metric of an earlier engine.
        if (stat_logger := metrics.stat_logger(vllm_config, self.engine_indexes)) is not None:
            self.stat_loggers.insert(0, stat_logger)

    StatLoggerManager.__init__ = init_hook
