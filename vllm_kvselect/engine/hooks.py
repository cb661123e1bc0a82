"""The places where vLLM has no public extension point, one function each.

Each has a matching diff in `patches/` in the form it would be sent upstream. What a hook replaces
is compared with the source it was written for (`sources.py`). Where it differs, eviction is
refused.
"""

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerManager

from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine.sources import KNOWN_SOURCES, source_digest, unknown_vllm

_in_beam_search: ContextVar[bool] = ContextVar("in_beam_search", default=False)
"""Whether requests that are made now are steps of a beam search."""


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
        hook_beam_searches()
        hook_stat_loggers()


def unknown_sources() -> list[str]:
    """Names of the functions whose source is not what the hooks were written for."""
    functions: list[Callable[..., Any]] = [
        AsyncLLM.generate,
        AsyncLLM.add_request,
        LLMEngine.add_request,
        BaseServing._check_model,
        BaseServing.__init__,
        BeamSearchOfflineMixin.beam_search,
        BeamSearchOnlineMixin.beam_search,
        StatLoggerManager.__init__,
        EngineArgs.from_cli_args,
        KVCacheManager.get_computed_blocks,
        UnitaryKVCacheCoordinator.find_longest_cache_hit,
        HybridKVCacheCoordinator.find_longest_cache_hit,
    ]
    return [
        function.__qualname__
        for function in functions
        if source_digest(function) not in KNOWN_SOURCES[function.__qualname__]
    ]


def hook_arguments(unknown: list[str]) -> None:
    """Adds the `--kv-eviction*` options and applies them (patches/0001).

    Plugins are loaded before vLLM fills its parser, but it offers them no way to extend it, nor to
    take part when its configuration is made. Where functions are unknown, eviction is refused when
    it is asked for.
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


def hook_cache_hits() -> None:
    """Lets our block manager plan a request and cap its prefix-cache hits (patches/0002).

    A block manager decides what is hashed, but not how far a request may be served from the cache;
    and of a request it is later told nothing but the id.
    """
    get_computed_blocks = KVCacheManager.get_computed_blocks

    @functools.wraps(get_computed_blocks)
    def get_computed_blocks_hook(
        self: KVCacheManager, request: Any, max_cache_hit_length: int | None = None
    ) -> Any:
        # Until 0.33 is the oldest release: before, nobody else could cap a hit.
        limit = () if max_cache_hit_length is None else (max_cache_hit_length,)
        blocks, num_tokens, boundary = get_computed_blocks(self, request, *limit)
        managers = self.coordinator.single_type_managers
        ours = [manager for manager in managers if hasattr(manager, "num_usable")]
        caps = [manager.most_found(request) for manager in ours]
        if ours and (found := _found_state(self, request, max_cache_hit_length)):
            (manager,) = managers
            return self.create_kv_cache_blocks((found,)), len(found) * manager.block_size, 0
        while num_tokens > (cap := _num_usable(ours, request, min([num_tokens, *caps]))):
            # Looked up again, not cut: a sliding window needs other blocks at another end, and may
            # find less then.
            found, num_tokens, _ = self.coordinator.find_longest_cache_hit(
                request.block_hashes, cap
            )
            blocks = self.create_kv_cache_blocks(found)
        return blocks, num_tokens, boundary

    KVCacheManager.get_computed_blocks = get_computed_blocks_hook


def _num_usable(managers: list[Any], request: Any, num_tokens: int) -> int:
    """How many tokens of a prefix-cache hit every manager can use."""
    for manager in managers:
        if num_tokens:
            num_tokens = manager.num_usable(request, num_tokens)
    return num_tokens


def _found_state(kv: KVCacheManager, request: Any, max_tokens: int | None) -> list[Any]:
    """The first blocks of a request whose beginning was compressed before; else none."""
    from vllm_kvselect.engine.scheduler import block_manager

    if not block_manager.shares_states(kv, request):
        return []
    return block_manager.headwise_manager(kv).find_state(request, max_tokens)


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

        if _in_beam_search.get():
            requests.keep_full_cache(self, sampling_params)
        requests.check_request(self, prompt, sampling_params)
        return generate(self, prompt, sampling_params, *args, **kwargs)

    @functools.wraps(add_request)
    def add_request_hook(
        self: LLMEngine, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from vllm_kvselect.engine.frontend import requests

        if _in_beam_search.get():
            requests.keep_full_cache(self, params)
        requests.check_request(self, prompt, params)
        return add_request(self, request_id, prompt, params, *args, **kwargs)

    @functools.wraps(add_request_async)
    async def add_request_async_hook(
        self: AsyncLLM, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from vllm_kvselect.engine.frontend import requests

        await requests.check_needs(self, prompt, params)
        return await add_request_async(self, request_id, prompt, params, *args, **kwargs)

    AsyncLLM.generate = generate_hook
    AsyncLLM.add_request = add_request_async_hook
    LLMEngine.add_request = add_request_hook


def hook_bodies() -> None:
    """Checks the bodies of HTTP requests for what does not reach the engine (patches/0006).

    vLLM ignores fields that it does not know, and for a beam search all of `vllm_xargs`. Bodies of
    two endpoints lose such fields when they are validated: there the request itself has them.
    """
    check_model, init = BaseServing._check_model, BaseServing.__init__

    @functools.wraps(check_model)
    async def check_model_hook(self: BaseServing, request: Any) -> Any:
        from vllm_kvselect.engine.frontend import requests

        if (engine := getattr(self, "engine_client", None)) is not None:
            await requests.check_body(engine, request)
        return await check_model(self, request)

    @functools.wraps(init)
    def init_hook(self: BaseServing, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for name in _SERVE_RAW:
            if (serve := getattr(self, name, None)) is not None:
                setattr(self, name, functools.partial(serve_checked, self, serve))

    async def serve_checked(
        handler: Any, serve: Callable[..., Any], request: Any, raw_request: Any = None
    ) -> Any:
        from vllm_kvselect.engine.frontend import requests

        await requests.check_dropped_fields(handler.engine_client, request, raw_request)
        return await serve(request, raw_request)

    BaseServing._check_model = check_model_hook
    BaseServing.__init__ = init_hook


_SERVE_RAW = ("serve_tokens", "create_messages")
"""Methods of handlers, of `/inference/v1/generate` and `/v1/messages`, that get the request, too.

Found on the handlers: importing their classes would bring all of vLLM's server into every process.
"""


def hook_beam_searches() -> None:
    """Lets the steps of a beam search keep the full cache (patches/0007).

    vLLM makes a request of each, with sampling parameters of its own, in which nothing says so.
    """
    search, search_online = BeamSearchOfflineMixin.beam_search, BeamSearchOnlineMixin.beam_search

    @functools.wraps(search)
    def search_hook(self: BeamSearchOfflineMixin, *args: Any, **kwargs: Any) -> Any:
        with _making_steps():
            return search(self, *args, **kwargs)

    @functools.wraps(search_online)
    async def search_online_hook(
        self: BeamSearchOnlineMixin, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        async with aclosing(search_online(self, *args, **kwargs)) as outputs:
            while True:
                with _making_steps():  # who takes an output may make other requests
                    output = await anext(outputs, None)
                if output is None:
                    return
                yield output

    BeamSearchOfflineMixin.beam_search = search_hook
    BeamSearchOnlineMixin.beam_search = search_online_hook


@contextmanager
def _making_steps() -> Iterator[None]:
    token = _in_beam_search.set(True)
    try:
        yield
    finally:
        _in_beam_search.reset(token)


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
