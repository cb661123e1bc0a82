"""Checks a request's settings in the front end, before it reaches the engine."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.frontend.arguments import requested
from vllm_kvselect.engine.frontend.checks import settings_problems
from vllm_kvselect.engine.frontend.metrics import EvictionStatLogger
from vllm_kvselect.engine.platforms import block_size_of, page_size_of, tokens_ahead
from vllm_kvselect.planning.cuts import most_blocks
from vllm_kvselect.planning.plan import plan
from vllm_kvselect.registry import METHODS, methods_without
from vllm_kvselect.request import (
    FULL_CACHE,
    REQUEST_KEYS,
    RequestError,
    refuse_beam_settings,
    refuse_stray_settings,
    request_config,
    unsupported,
)
from vllm_kvselect.scorers import Need

_RPC = "kv_eviction_problems"
"""A method of our workers."""

_problems: WeakKeyDictionary[Any, dict[Need, str]] = WeakKeyDictionary()
"""By engine: what its workers' layers could not be bound to, and why."""


class RequestRefusedError(VLLMValidationError, ValueError):
    """A request that cannot be honoured: 400 over HTTP, a `ValueError` offline."""


def keep_full_cache(engine: Any, params: Any) -> None:
    """Lets a step of a beam search keep the full cache: nobody asks what settings it shall have."""
    if requested(engine.vllm_config) is not None:
        params.extra_args = FULL_CACHE


def check_request(engine: Any, prompt: Any, params: Any) -> None:
    """Refuses a request whose settings the engine cannot honour.

    Raises:
        RequestRefusedError: With the reason and what to do.
    """
    server = requested(engine.vllm_config)
    if server is None:
        return
    with _refusing(engine):
        _refuse_input_streams(prompt)
        extra_args = _extra_args(prompt, params)
        eviction = request_config(server, extra_args)
        others = {k: v for k, v in (extra_args or {}).items() if k not in REQUEST_KEYS}
        refuse_stray_settings(others, _settings(engine), is_field=False)
        is_other = eviction.enabled and eviction != server
        if is_other and (problems := settings_problems(engine.vllm_config, eviction)):
            raise unsupported("; ".join(problems), extra_args or {})
        _refuse_media(engine.vllm_config, eviction, prompt)
        _refuse_too_large(engine, server, prompt, params)
        if isinstance(engine, LLMEngine) and (needs := _new_needs(server, eviction)):
            if engine not in _problems:
                _remember(engine, engine.collective_rpc(_RPC))
            _refuse_without(engine, needs)


async def check_needs(engine: Any, prompt: Any, params: Any) -> None:
    """Refuses a request of `AsyncLLM` whose method needs what the model's layers cannot give.

    The workers know, and are asked at the first such request. `check_request` cannot wait.

    Raises:
        RequestRefusedError: With the reason and what to do.
    """
    await _check_needs(engine, _extra_args(prompt, params))


async def check_body(engine: Any, request: Any) -> None:
    """Refuses what only the body of an HTTP request shows, before a response begins.

    These are settings in fields that vLLM does not know, and those of a beam search, which it does
    not hand on.

    Raises:
        RequestRefusedError: With the reason and what to do.
    """
    server = requested(engine.vllm_config)
    if server is None:
        return
    extra_args = getattr(request, "vllm_xargs", None)
    # A batch of chats hands what it does not know on to its chats.
    is_batch = hasattr(request, "to_chat_completion_request")
    takes = "vllm_xargs" in type(request).model_fields or is_batch
    place = "vllm_xargs" if takes else None
    unknown = {k: v for k, v in (request.model_extra or {}).items() if k != place}
    with _refusing(engine):
        refuse_stray_settings(unknown, place)
        if getattr(request, "use_beam_search", False):
            refuse_beam_settings(server, extra_args)
    await _check_needs(engine, extra_args)


async def check_dropped_fields(engine: Any, request: Any, raw_request: Any) -> None:
    """Refuses settings in fields of an HTTP request that its validated body no longer has.

    Raises:
        RequestRefusedError: With the reason and what to do.
    """
    if raw_request is None or requested(engine.vllm_config) is None:
        return
    fields, known = await raw_request.json(), type(request).model_fields
    unknown = {name: value for name, value in fields.items() if name not in known}
    place = "vllm_xargs"
    if isinstance(sampling := fields.get("sampling_params"), dict) and place not in known:
        place, of_sampling = "sampling_params.extra_args", SamplingParams.__struct_fields__
        unknown["sampling_params"] = {k: v for k, v in sampling.items() if k not in of_sampling}
    with _refusing(engine):
        refuse_stray_settings(unknown, place)


async def _check_needs(engine: Any, extra_args: dict[str, Any] | None) -> None:
    server = requested(engine.vllm_config)
    if server is None or not extra_args:
        return
    with _refusing(engine):
        needs = _new_needs(server, request_config(server, extra_args))
        if not needs:
            return
        if engine not in _problems:
            _remember(engine, await engine.collective_rpc(_RPC))
        _refuse_without(engine, needs)


def _new_needs(server: EvictionConfig, eviction: EvictionConfig) -> frozenset[Need]:
    """What a request's method needs beyond the default one, without which no server starts."""
    nothing: frozenset[Need] = frozenset()
    chosen, default = (
        METHODS[name].needs if name in METHODS else nothing
        for name in (eviction.method, server.method)
    )
    return chosen - default


def _remember(engine: Any, answers: list[dict[Need, str]]) -> None:
    """Keeps what the workers said: one with a problem is enough."""
    _problems[engine] = {need: why for answer in answers for need, why in answer.items()}


def _refuse_without(engine: Any, needs: frozenset[Need]) -> None:
    for need, problem in _problems[engine].items():
        if need in needs:
            raise RequestError(problem, "kv_eviction", "unsupported")


@contextmanager
def _refusing(engine: Any) -> Iterator[None]:
    """Turns a `RequestError` into what vLLM answers with, and counts it."""
    try:
        yield
    except RequestError as error:
        for stat_logger in engine.logger_manager.stat_loggers if engine.logger_manager else ():
            if isinstance(stat_logger, EvictionStatLogger):
                stat_logger.record_refusal(error.reason)
        parameter = _parameter(engine, error)
        # mypy sees `ValueError` alone: to it, vLLM's classes are of type `Any`.
        raise RequestRefusedError(str(error), parameter=parameter) from None  # type: ignore[call-arg]


def _parameter(engine: Any, error: RequestError) -> str | None:
    """What is at fault, as the client wrote it; None if it is no single field."""
    if error.is_field:
        return error.key or None
    return f"{_settings(engine)}.{error.key}" if error.key else _settings(engine)


def _settings(engine: Any) -> str:
    """Where requests of an engine have their settings."""
    return "extra_args" if isinstance(engine, LLMEngine) else "vllm_xargs"


def _extra_args(prompt: Any, params: Any) -> dict[str, Any] | None:
    if isinstance(prompt, EngineCoreRequest):
        params = prompt.params
    return getattr(params, "extra_args", None)


def _refuse_media(vllm_config: VllmConfig, eviction: EvictionConfig, prompt: Any) -> None:
    """Refuses images, videos and sounds where a method takes a token's place for its position."""
    if not (eviction.enabled and vllm_config.model_config.uses_mrope and _has_media(prompt)):
        return
    if "rotation" in METHODS[eviction.method].needs:
        raise RequestError(
            f"eviction method {eviction.method!r} takes text alone of this model: in images, "
            "videos and sounds, positions have several parts (M-RoPE); choose one of "
            f"{', '.join(methods_without('rotation'))}",
            "kv_eviction",
            "unsupported",
        )


def _has_media(prompt: Any) -> bool:
    """Whether a prompt holds more than text, as a client gives it or as vLLM has prepared it."""
    if isinstance(prompt, EngineCoreRequest):
        return bool(prompt.mm_features)
    return isinstance(prompt, dict) and bool(
        prompt.get("multi_modal_data") or prompt.get("mm_placeholders")
    )


def _refuse_too_large(engine: Any, server: EvictionConfig, prompt: Any, params: Any) -> None:
    """Refuses what would wait for ever: a request that holds more at once than the pool has.

    In stock vLLM there is none, since the longest one fits. With cuts in prompts and answers it
    need not, and then a request must be bounded, too.
    """
    config = engine.vllm_config
    block_size, max_model_len = block_size_of(config), config.model_config.max_model_len
    if not (num_blocks := config.cache_config.num_gpu_blocks):
        return  # an engine that has no cache yet
    # Of all engines that this front end talks to together; they are alike. One is the null block.
    num_engines = len(getattr(engine.engine_core, "core_engines", ())) or 1
    num_blocks = num_blocks // num_engines
    num_blocks -= 1 + _num_beside(config, server, num_blocks)
    if num_blocks * block_size >= max_model_len:
        return
    if isinstance(prompt, EngineCoreRequest):
        prompt, params = {"prompt_token_ids": prompt.prompt_token_ids}, prompt.params
    token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if isinstance(prompt, str):
        token_ids = engine.get_tokenizer().encode(prompt)
    num_prompt_tokens = max_model_len if token_ids is None else len(token_ids)
    num_tokens = min(max_model_len, num_prompt_tokens + (params.max_tokens or max_model_len))
    sizes = block_size, page_size_of(config)
    made = plan(server, params, token_ids, num_prompt_tokens, *sizes)
    num_ahead = tokens_ahead(config)
    held_for = min(max_model_len, num_tokens + num_ahead)
    most = made.cuts.most_held(held_for, block_size, num_ahead)
    if most > num_blocks:
        remedy = (
            "ask for two tokens: of a prompt that only one follows nothing is dropped"
            if params.max_tokens == 1
            else "ask for fewer tokens or a smaller budget, or let it be cut: "
            "kv_eviction_prompt_interval and kv_eviction_decode_budget bound what a request holds"
        )
        raise RequestError(
            f"a prompt of {num_prompt_tokens} tokens with up to {num_tokens - num_prompt_tokens} "
            f"more needs {most} blocks at once, and the KV cache has {num_blocks}; {remedy}",
            "prompt",
            "too_large",
            is_field=True,
        )


def _num_beside(config: VllmConfig, server: EvictionConfig, num_blocks: int) -> int:
    """The most blocks that a request holds of layers that drop nothing.

    They are what vLLM counted of the longest request, beside its layers that drop entries. Their
    kinds are known to the engines alone.
    """
    num_requests = config.cache_config.kv_cache_max_concurrency
    if not num_requests:
        return 0
    lengths = config.model_config.max_model_len, block_size_of(config)
    num_dropping = most_blocks(*lengths, server, tokens_ahead(config))
    return round(num_blocks / num_requests) - num_dropping


def _refuse_input_streams(prompt: Any) -> None:
    if isinstance(prompt, AsyncGenerator):
        raise RequestError(
            "a prompt that grows while it is served is not supported with --kv-eviction; send the "
            "whole prompt at once",
            "prompt",
            "unsupported",
            is_field=True,
        )
