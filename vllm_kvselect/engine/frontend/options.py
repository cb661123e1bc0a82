"""The `--kv-eviction*` and `--kv-prefill*` options of vLLM's command line."""

import argparse
from typing import Any

from vllm.utils.argparse_utils import human_readable_int

from vllm_kvselect.config import OVERRIDE_NAMES, ConfigError, EvictionConfig, keys
from vllm_kvselect.registry import AUTO, METHODS, nearest

_DEFAULTS = {name: info.default for name, info in keys().items()}
_METHODS = ("none", AUTO, *METHODS)
_FIELDS = (
    "method",
    "budget",
    "prompt_interval",
    "decode_budget",
    "decode_interval",
    "context",
    "window",
    "alpha",
    "probe",
    "prefill",
    "prefill_budget",
    "prefill_dense_until",
    "allow_override",
    "context_store",
    "context_store_bytes",
    "check_integrity",
)
"""Fields of `EvictionConfig` with an option of their own, `args.kv_eviction_<field>`."""


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Adds the options to vLLM's parser, in a group of their own.

    Args:
        parser: vLLM's parser; parsed values appear as `kv_eviction_*`, None where not given.
    """
    group = parser.add_argument_group(
        title="KVEviction",
        description="Retain only the critical KV entries of every attention head (vllm-kvselect).",
    )
    group.add_argument(
        "--kv-eviction",
        dest="kv_eviction_method",
        type=_method,
        choices=_METHODS,
        help=_help(
            "Method that chooses the entries; 'none' is stock vLLM, 'auto' takes the best one that "
            "the model allows.",
            "none",
        ),
    )
    group.add_argument(
        "--kv-eviction-budget",
        type=lambda text: _field("budget", _number(text)),
        metavar="ENTRIES|FRACTION",
        help=_help(
            "Entries retained per KV head and layer, window included: a number (1024) or a "
            "fraction of the prompt (0.2).",
            _DEFAULTS["budget"],
        ),
    )
    group.add_argument(
        "--kv-eviction-prompt-interval",
        type=lambda text: _field("prompt_interval", _number(text)),
        metavar="TOKENS",
        help=_help(
            "Tokens of a prompt after which its entries are brought back to the budget while it is "
            "computed, the latest ones aside; 0 waits for the prompt's end.",
            _DEFAULTS["prompt_interval"],
        ),
    )
    group.add_argument(
        "--kv-eviction-decode-budget",
        type=lambda text: _field("decode_budget", _number(text)),
        metavar="ENTRIES",
        help=_help(
            "Entries per KV head and layer to which a request is brought back in rounds while it "
            "generates, window included; 0 lets its answer grow.",
            _DEFAULTS["decode_budget"],
        ),
    )
    group.add_argument(
        "--kv-eviction-decode-interval",
        type=lambda text: _field("decode_interval", _number(text)),
        metavar="TOKENS",
        help=_help("Tokens from one of these rounds to the next.", _DEFAULTS["decode_interval"]),
    )
    group.add_argument(
        "--kv-eviction-context",
        type=lambda text: _field("context", text if text == "chat" else _number(text)),
        metavar="TOKENS|chat",
        help=_help(
            "Part of each prompt that is compressed on its own and shared by all requests that "
            "have it: its first tokens (6000), or what comes before the first question of a chat.",
            "the whole prompt, not shared",
        ),
    )
    group.add_argument(
        "--kv-eviction-window",
        type=lambda text: _field("window", _number(text)),
        metavar="TOKENS",
        help=_help(
            "Last prompt tokens, whose queries score the entries before them.", _DEFAULTS["window"]
        ),
    )
    group.add_argument(
        "--kv-eviction-alpha",
        type=lambda text: _field("alpha", _share(text)),
        metavar="SHARE",
        help=_help(
            "Share of the budget that the first of two stages fills ('-perturb' methods).",
            _DEFAULTS["alpha"],
        ),
    )
    group.add_argument(
        "--kv-eviction-probe",
        type=lambda text: _field("probe", text),
        metavar="FILE",
        help=_help(
            "Probe of the model, by vllm-kvselect calibrate ('probe' methods).",
            "the one that fits the model, in the user's cache or in the package",
        ),
    )
    group.add_argument(
        "--kv-eviction-allow-override",
        action=_List,
        nargs="+",
        metavar="FIELD",
        help=_help(
            "What a request may choose for itself, with blanks or commas between: "
            f"{', '.join(OVERRIDE_NAMES)}.",
            "nothing",
        ),
    )
    _add_store_args(group)
    group.add_argument(
        "--kv-eviction-check-integrity",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=_help(
            "Check all KV cache blocks after every step; stop requests whose blocks are wrong.",
            "off",
        ),
    )
    group.add_argument(
        "--kv-eviction-config",
        metavar="FILE",
        help=_help(
            "YAML file with these and further settings; options on the command line win.",
            "no file",
        ),
    )
    _add_prefill_args(group)


class _List(argparse.Action):
    """A list as vLLM's own options take one, in several words; commas may part names, too.

    A list in the YAML file of `--config` arrives as several words.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Puts the names into the namespace, once they are accepted."""
        names = " ".join(values).replace(",", " ").split()
        try:
            if not names:
                raise argparse.ArgumentTypeError("expected at least one name")
            _field(self.dest.removeprefix("kv_eviction_"), names)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, names)


def _add_store_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv-eviction-context-store",
        type=lambda text: _field("context_store", text),
        metavar="FOLDER",
        help=_help(
            "Folder that keeps compressed contexts for later starts and other servers.",
            "contexts live in the pool alone",
        ),
    )
    group.add_argument(
        "--kv-eviction-context-store-bytes",
        type=_bytes,
        metavar="BYTES",
        help=_help(
            "Bytes that its files may take, such as 50G; the least recently used ones go.",
            "no bound",
        ),
    )


def _add_prefill_args(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv-prefill",
        dest="kv_eviction_prefill",
        type=lambda text: _field("prefill", text),
        metavar="dense|critiprefill",
        help=_help(
            "What the tokens of long prompts read: all tokens before them, or critical blocks.",
            _DEFAULTS["prefill"],
        ),
    )
    group.add_argument(
        "--kv-prefill-budget",
        dest="kv_eviction_prefill_budget",
        type=lambda text: _field("prefill_budget", _number(text)),
        metavar="TOKENS",
        help=_help("Tokens in these blocks.", _DEFAULTS["prefill_budget"]),
    )
    group.add_argument(
        "--kv-prefill-dense-until",
        dest="kv_eviction_prefill_dense_until",
        type=lambda text: _field("prefill_dense_until", _number(text)),
        metavar="TOKENS",
        help=_help(
            "First tokens of a prompt that read all before them.", _DEFAULTS["prefill_dense_until"]
        ),
    )


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that a command line has, by the names of their fields, and without the file."""
    values = {name: getattr(args, f"kv_eviction_{name}", None) for name in _FIELDS}
    return {name: value for name, value in values.items() if value is not None}


def _help(text: str, default: object) -> str:
    """A help text with what holds where the option is not given.

    The parser's own default is None, which would be shown, did the text not hold `%(default)`.
    """
    return f"{text} (default: {default})%(default).0s"


def _number(text: str) -> int | float:
    """An int where the text is one as vLLM reads them, such as 8k, else a float.

    1 entry is not the fraction 1.0.
    """
    try:
        return human_readable_int(text)
    except ValueError:
        return _share(text)


def _bytes(text: str) -> int:
    """A number of bytes that is some; that there is a folder is checked with the others."""
    value = _number(text)
    _field("context_store_bytes", value, context_store="folder")
    return int(value)


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _method(text: str) -> str:
    """A method, so that the parser names the nearest of an unknown one."""
    if text not in _METHODS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no method; {nearest(text, _METHODS)}the methods are {', '.join(_METHODS)}"
        )
    return text


def _field(name: str, value: Any, **needed: Any) -> Any:
    """Validates one field, so that the parser reports it like any other bad argument.

    Args:
        name: The field.
        value: What it is given.
        **needed: Fields without which it would not be accepted.
    """
    try:
        EvictionConfig.parse({name: value, **needed})
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value
