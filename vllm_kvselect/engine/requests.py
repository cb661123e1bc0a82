"""Checks a request's settings in the front end, before it reaches the engine."""

from collections.abc import AsyncGenerator
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.arguments import server_config
from vllm_kvselect.engine.checks import settings_problems
from vllm_kvselect.engine.metrics import EvictionStatLogger
from vllm_kvselect.request import RequestError, request_config


class RequestRefusedError(VLLMValidationError, ValueError):
    """A request that cannot be honoured: 400 over HTTP, a `ValueError` offline."""


def check_request(engine: Any, prompt: Any, params: Any) -> None:
    """Refuses a request whose settings the engine cannot honour.

    Args:
        engine: vLLM's `AsyncLLM` or `LLMEngine`.
        prompt: The prompt, or a whole `EngineCoreRequest`.
        params: Its sampling parameters.

    Raises:
        RequestRefusedError: With the reason and what to do.
    """
    server = server_config(engine.vllm_config)
    if server is None:
        return
    if isinstance(prompt, EngineCoreRequest):
        params = prompt.params
    try:
        _refuse_input_streams(prompt)
        eviction = request_config(server, getattr(params, "extra_args", None))
        if eviction.enabled and eviction != server:
            _refuse_unsupported(engine.vllm_config, eviction)
    except RequestError as error:
        for stat_logger in engine.logger_manager.stat_loggers if engine.logger_manager else ():
            if isinstance(stat_logger, EvictionStatLogger):
                stat_logger.record_refusal(error.reason)
        # mypy sees `ValueError` alone: to it, vLLM's classes are of type `Any`.
        raise RequestRefusedError(str(error), parameter=error.key) from None  # type: ignore[call-arg]


def _refuse_input_streams(prompt: Any) -> None:
    if isinstance(prompt, AsyncGenerator):
        raise RequestError(
            "a prompt that grows while it is served is not supported with --kv-eviction; send the "
            "whole prompt at once",
            "prompt",
            "unsupported",
        )


def _refuse_unsupported(vllm_config: VllmConfig, eviction: EvictionConfig) -> None:
    """Refuses what the server could not have been started with."""
    if problems := settings_problems(vllm_config, eviction):
        raise RequestError("; ".join(problems), "vllm_xargs", "unsupported")
