"""What one request asks for: the server's configuration with the fields that the request changes.

A client sends `vllm_xargs`, which vLLM hands on as `SamplingParams.extra_args`. The front end
refuses what is not accepted; the scheduler and the workers then compute the same configuration.
"""

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal, Protocol, get_args

from vllm_kvselect.config import OVERRIDE_NAMES, SETTINGS, ConfigError, EvictionConfig, Prefill
from vllm_kvselect.registry import AUTO, KNOWN_METHODS, not_served
from vllm_kvselect.settings import request_key

REQUEST_KEYS = {request_key(field): field for field in OVERRIDE_NAMES}
"""Keys of `vllm_xargs`, and the field of `EvictionConfig` that each one changes."""

MAX_KEYS = 64
"""Keys that a request may send, other people's included, and unknown fields of its body.

Each is compared with ours, in the front end and in every engine process. What is known to use
`vllm_xargs` takes a handful; 64 leave room and cost about a millisecond.
"""

_SIMILARITY = 0.8
"""`difflib`'s ratio from which on a key is taken for one of ours.

Two wrong letters in `kv_eviction` give 0.82. Names that vLLM and others use give less than 0.7:
`kv_transfer_params`, `kv_connector`, `session_id`.
"""

_LONGEST_LOOKED_AT = 40
"""Letters of a key that are compared: longer ones are too unlike ours anyway."""

FULL_CACHE: dict[str, Any] = {"kv_eviction": "none", "kv_prefill": "dense"}
"""Settings that our front end gives to the steps of a beam search, whatever the server allows.

It knows them by their identity: from a client the same keys and values are a client's. Scheduler
and workers see a copy, and plan the same with it whether they accept it or not.
"""

RefusalReason = Literal[
    "unknown_key", "invalid_value", "not_allowed", "unsupported", "too_many_keys", "too_large"
]
REFUSAL_REASONS: tuple[RefusalReason, ...] = get_args(RefusalReason)
"""Why a request is refused: few and fixed, because they label a metric."""


class Sampling(Protocol):
    """What is read of vLLM's `SamplingParams`."""

    extra_args: dict[str, Any] | None
    max_tokens: int | None
    prompt_logprobs: int | None


class RequestError(ConfigError):
    """A request that cannot be honoured.

    Attributes:
        key: The key of `vllm_xargs` at fault; empty if it is none of them alone.
        reason: The kind of fault.
        is_field: Whether `key` is a field of the request itself.
    """

    def __init__(
        self, message: str, key: str, reason: RefusalReason, is_field: bool = False
    ) -> None:
        super().__init__(message)
        self.key, self.reason, self.is_field = key, reason, is_field


def request_config(server: EvictionConfig, extra_args: Mapping[str, Any] | None) -> EvictionConfig:
    """Configuration of one request; keys of `extra_args` that are not ours are other people's.

    Returns:
        The server's configuration where the request changes nothing, else a changed one. Where
        cuts in prompts suit the server's method but not the one that the request names, it is cut
        at its end alone, unless it names an interval, too.

    Raises:
        RequestError: If a key of ours is unknown, values are not accepted alone or together, or the
            server does not allow the change.
    """
    if extra_args is FULL_CACHE:
        return _full_cache(server)
    changes = {}
    _refuse_too_many(extra_args or (), "keys of vllm_xargs")
    for key, value in (extra_args or {}).items():
        if key in REQUEST_KEYS:
            changes[REQUEST_KEYS[key]] = _checked(server, key, value)
        elif meant := _meant(key):
            accepted = ", ".join(REQUEST_KEYS)
            raise RequestError(
                f"unknown key {key!r}, did you mean {meant!r}? accepted keys: {accepted}",
                key,
                "unknown_key",
            )
    if not changes:
        return server
    method = KNOWN_METHODS.get(changes.get("method", ""))
    is_suited = server.enabled and KNOWN_METHODS[server.method].in_prompts
    if method is not None and not method.in_prompts and is_suited and server.prompt_interval:
        changes.setdefault("prompt_interval", 0)
    try:
        return _changed(server, **changes)
    except ConfigError as error:  # each is accepted, but not all of them together
        raise unsupported(str(error), extra_args or {}) from None


def unsupported(message: str, extra_args: Mapping[str, Any]) -> RequestError:
    """The refusal of settings that are judged together, one of which at least is ours.

    Returns:
        The error, with the first of the request's keys that the message names; with its first one
        where it names none.
    """
    message = _in_the_requests_words(message)
    ours = [key for key in REQUEST_KEYS if key in extra_args]
    named = [key for key in ours if re.search(rf"\b{key} = ", message)]
    return RequestError(message, (named or ours)[0], "unsupported")


def refuse_stray_settings(
    fields: Mapping[str, Any], place: str | None, is_field: bool = True
) -> None:
    """Refuses settings where nobody would read them, such as beside `vllm_xargs`.

    A proxy may send them inside of something, so what the fields hold is looked through, too.
    `place` is where such a request takes settings; None if nowhere.

    Raises:
        RequestError: If one of the names is a key of ours, or nearly one.
    """
    _refuse_too_many(fields, "unknown fields", is_field=True)
    found: list[tuple[str, str]] = []
    pending: list[tuple[str, Any]] = [("", fields)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, list):
            pending += [(path, each) for each in value]
        if not isinstance(value, Mapping):
            continue
        for name, inner in value.items():
            inside = f"{path}.{name}" if path else str(name)
            pending.append((inside, inner))
            if _may_be_meant(name):
                found.append((inside, name))
    _refuse_too_many(found, "names of unknown fields", is_field=True)
    for path, name in found:
        if meant := _meant(name):
            raise RequestError(
                f"field {path!r} has no effect here; {_where_it_belongs(meant, place)}",
                path,
                "unknown_key",
                is_field,
            )


def _where_it_belongs(key: str, place: str | None) -> str:
    if place is None:
        return "such a request has the server's settings: leave it out"
    written = f'{{"{key}": ...}}'
    for name in reversed(place.split(".")):
        written = f'{{"{name}": {written}}}'
    return f"send it as {written}"


def refuse_beam_settings(server: EvictionConfig, extra_args: Mapping[str, Any] | None) -> None:
    """Refuses a beam search that asks for anything but the full cache.

    vLLM runs each step of each beam as a request of its own, and does not hand the client's
    settings on. All of them run as in stock vLLM (`FULL_CACHE`).

    Raises:
        RequestError: If a setting is not accepted or asks for what no step would do.
    """
    asked = request_config(server, extra_args)
    for key, field in REQUEST_KEYS.items():
        is_sparse = asked.of(Prefill).prefill != "dense"
        acts = is_sparse if field.startswith("prefill") else asked.enabled
        if acts and key in (extra_args or {}):
            raise RequestError(
                f"{key} has no effect with use_beam_search, which keeps the full cache; leave one "
                "of them out",
                key,
                "unsupported",
            )


def planned_config(server: EvictionConfig, params: Sampling | None) -> EvictionConfig:
    """Configuration that scheduler and workers plan a request with.

    What must be exact reads everything. Where log-probabilities of the prompt are asked for, it is
    cut at its end alone. A request for one token drops nothing: that token comes from the full
    cache, and with it the request gives all of its blocks back. Only where a context is marked does
    it read what is retained.

    The front end has refused what `request_config` does not accept. Should such a request still
    come, by a way that we do not know, it drops nothing: it must not stop everybody's engine.

    Returns:
        As `request_config`, without cuts where exactness asks for that; where it raises, with
        method `none` and a dense prefill.
    """
    if params is None:
        return server
    try:
        config = request_config(server, params.extra_args)
    except RequestError:
        return _full_cache(server)
    if params.prompt_logprobs is not None and (config.context or config.prompt_interval):
        config = _changed(config, context=None, prompt_interval=0)
    if params.max_tokens == 1 and config.context is None:
        return _changed(config, method="none")
    return config


def _in_the_requests_words(message: str) -> str:
    """A message about a configuration, with the keys of a request in place of the fields."""
    for key, field in REQUEST_KEYS.items():
        message = re.sub(rf"\b{field} = ", f"{key} = ", message)
    return message


def _full_cache(server: EvictionConfig) -> EvictionConfig:
    return _changed(server, method="none", prefill="dense")


def _refuse_too_many(names: Collection[object], what: str, is_field: bool = False) -> None:
    if len(names) > MAX_KEYS:
        raise RequestError(
            f"{len(names)} {what} are too many; a server with --kv-eviction accepts {MAX_KEYS}",
            "",
            "too_many_keys",
            is_field,
        )


def _may_be_meant(key: str) -> bool:
    """Whether a name needs to be compared with ours: a cheap question, for all of a body."""
    key = str(key)[:_LONGEST_LOOKED_AT].lower()
    return any(part in key for part in ("kv", "evict", "prefill"))


def _meant(key: str) -> str | None:
    """The key of ours that another one was probably meant to be, or None.

    A prefix alone would not do: `kv_` is that of vLLM's own `kv_transfer_params`, too.
    """
    key = re.sub(r"[^a-z0-9]+", "_", str(key)[:_LONGEST_LOOKED_AT].lower())
    cutoff = 0.0 if key.replace("_", "").startswith("kvevict") else _SIMILARITY
    return next(iter(get_close_matches(key, REQUEST_KEYS, 1, cutoff)), None)


def _checked(server: EvictionConfig, key: str, value: Any) -> Any:
    """A value that is accepted and that the server lets the request choose."""
    field = REQUEST_KEYS[key]
    if field == "method" and value == AUTO:
        return server.method  # what it chose for all requests that say nothing
    try:
        # Alone: whether all go together is seen later.
        EvictionConfig.parse({"method": "none", **_prefill_of(server), field: value})
    except ConfigError as error:
        raise RequestError(_in_the_requests_words(str(error)), key, "invalid_value") from None
    if field == "method" and (problem := not_served(value)):
        raise RequestError(f"{key} = {value!r} {problem}", key, "unsupported")
    default = getattr(server, field)
    # An int and the float that equals it are different budgets: 1 entry, and all of the prompt.
    same = type(value) is type(default) and value == default
    if not same and field not in server.allow_override:
        raise RequestError(
            f"{key} = {value!r} is not allowed: this server keeps "
            f"{SETTINGS[field].otherwise if default is None else repr(default)} for every request; "
            f"start it with --kv-eviction-allow-override {field} to let requests choose",
            key,
            "not_allowed",
        )
    return value


@lru_cache(maxsize=16)
def _prefill_of(server: EvictionConfig) -> dict[str, Any]:
    """How the server prefills: a budget of a request counts in its blocks."""
    fields = server.model_dump().items()
    return {name: value for name, value in fields if name.startswith("prefill")}


@lru_cache(maxsize=1024, typed=True)
def _changed(server: EvictionConfig, **changes: Any) -> EvictionConfig:
    return EvictionConfig.parse(server.model_dump() | changes)
