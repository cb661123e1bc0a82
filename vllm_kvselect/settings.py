"""What users are told of a setting, beside its type, bounds and default: each field says it itself.

`config.SETTINGS` is the table. Options, keys of requests, documentation and help are made from it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """What stands at a field of the configuration, for people who run servers.

    Attributes:
        help: What it does.
        operator: Whether it is an operator's; all others are for experts.
        option: What its option takes, as help shows it; None where it has none.
        in_requests: Whether a request may choose it, where the server allows that.
        otherwise: What holds where it is not given, if its default does not say so.
    """

    help: str
    operator: bool = False
    option: str | None = None
    in_requests: bool = False
    otherwise: str = ""


def request_key(field: str) -> str:
    """The key of `vllm_xargs` that chooses a field; its option is named likewise."""
    if field == "method":
        return "kv_eviction"
    return f"kv_{field}" if field.startswith("prefill") else f"kv_eviction_{field}"


def option_of(field: str) -> str:
    """The option of the command line that sets a field."""
    return f"--{request_key(field).replace('_', '-')}"
