"""What one request asks for: the server's configuration with the fields that the request changes.

A client sends `vllm_xargs`, which vLLM hands on as `SamplingParams.extra_args`. The front end
refuses what is not accepted; the scheduler and the workers then compute the same configuration.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, get_args

from vllm_kvselect.config import ConfigError, EvictionConfig

REQUEST_KEYS = {"kv_eviction": "method", "kv_eviction_budget": "budget"}
"""Keys of `vllm_xargs`, and the field of `EvictionConfig` that each one changes."""

_PREFIX = "kv_eviction"

RefusalReason = Literal["unknown_key", "invalid_value", "not_allowed", "unsupported"]
REFUSAL_REASONS: tuple[RefusalReason, ...] = get_args(RefusalReason)
"""Why a request is refused: few and fixed, because they label a metric."""


class RequestError(ConfigError):
    """A request that cannot be honoured.

    Attributes:
        key: The key of `vllm_xargs` at fault.
        reason: The kind of fault.
    """

    def __init__(self, message: str, key: str, reason: RefusalReason) -> None:
        super().__init__(message)
        self.key, self.reason = key, reason


def request_config(server: EvictionConfig, extra_args: Mapping[str, Any] | None) -> EvictionConfig:
    """Configuration of one request.

    Args:
        server: The server's configuration.
        extra_args: `SamplingParams.extra_args`; keys that are not ours are other people's.

    Returns:
        The server's configuration where the request changes nothing, else a changed one.

    Raises:
        RequestError: If a key of ours is unknown, a value is not accepted, or the server does not
            allow the change.
    """
    changes = {}
    for key, value in (extra_args or {}).items():
        if not key.startswith(_PREFIX):
            continue
        if key not in REQUEST_KEYS:
            accepted = ", ".join(REQUEST_KEYS)
            raise RequestError(
                f"unknown key {key!r}; accepted keys: {accepted}", key, "unknown_key"
            )
        changes[REQUEST_KEYS[key]] = _checked(server, key, value)
    return _changed(server, **changes) if changes else server


def planned_config(server: EvictionConfig, extra_args: Mapping[str, Any] | None) -> EvictionConfig:
    """Configuration that scheduler and workers plan a request with.

    The front end has refused what `request_config` does not accept. Should such a request still
    come, by a way that we do not know, it drops nothing: it must not stop everybody's engine.

    Args:
        server: The server's configuration.
        extra_args: `SamplingParams.extra_args`.

    Returns:
        As `request_config`, with the method `none` where that raises.
    """
    try:
        return request_config(server, extra_args)
    except RequestError:
        return _changed(server, method="none")


def _checked(server: EvictionConfig, key: str, value: Any) -> Any:
    """A value that is accepted and that the server lets the request choose."""
    field = REQUEST_KEYS[key]
    try:
        EvictionConfig.parse({field: value})
    except ConfigError as error:
        # The message names the field; the client knows it by its key.
        message = str(error).replace(f"{field} = ", f"{key} = ")
        raise RequestError(message, key, "invalid_value") from None
    default = getattr(server, field)
    # An int and the float that equals it are different budgets: 1 entry, and all of the prompt.
    same = type(value) is type(default) and value == default
    if not same and field not in server.allow_override:
        raise RequestError(
            f"{key} = {value!r} is not allowed: this server keeps {default!r} for every request; "
            f"start it with --kv-eviction-allow-override {field} to let requests choose",
            key,
            "not_allowed",
        )
    return value


@lru_cache(maxsize=1024, typed=True)
def _changed(
    server: EvictionConfig, method: str | None = None, budget: int | float | None = None
) -> EvictionConfig:
    given = {"method": method, "budget": budget}
    changes = {field: value for field, value in given.items() if value is not None}
    return EvictionConfig.parse(server.model_dump() | changes)
