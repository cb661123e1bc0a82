"""The `--kv-eviction*` and `--kv-prefill*` options of vLLM's command line, from the settings."""

import argparse
from typing import Any, get_args, get_origin

from vllm.utils.argparse_utils import human_readable_int

from vllm_kvselect.config import SETTINGS, ConfigError, EvictionConfig, keys, words
from vllm_kvselect.registry import AUTO, METHODS, nearest
from vllm_kvselect.settings import option_of

_METHODS = ("none", AUTO, *METHODS)
_NEEDED = {"context_store_bytes": {"context_store": "folder"}}
"""Settings without which one would not be accepted."""


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Adds the options to vLLM's parser: operators' in a group that experts' follow in their own.

    vLLM sorts each group by names, and shows one for `--help=` with its title. Parsed values appear
    as `kv_eviction_*`, None where not given.
    """
    operators = parser.add_argument_group(
        title="KV-Eviction",
        description="Keep only the critical KV entries of every attention head (vllm-kvselect); "
        "--help=kv-eviction-experts shows more options.",
    )
    experts = parser.add_argument_group(
        title="KV-Eviction-Experts", description="Further options of --kv-eviction."
    )
    for name, setting in SETTINGS.items():
        if setting.option is not None:
            _add(operators if setting.operator else experts, name)
    operators.add_argument(
        "--kv-eviction-config",
        metavar="FILE",
        help=_shown(
            "YAML file with these and further settings; options on the command line win.", "no file"
        ),
    )


def _add(group: argparse._ArgumentGroup, name: str) -> None:
    """Adds the option of a setting, as its type takes one."""
    setting, kinds = SETTINGS[name], _kinds(keys()[name].annotation)
    text = setting.help
    if tuple in kinds:
        text += f" Of {', '.join(words(name))}."
    how: dict[str, Any] = {"metavar": setting.option, "type": lambda given: _read(name, given)}
    if bool in kinds:
        how = {"action": argparse.BooleanOptionalAction, "default": None}
    elif tuple in kinds:
        how = {"metavar": setting.option, "action": _List, "nargs": "+"}
    group.add_argument(
        option_of(name),
        dest=f"kv_eviction_{name}",
        help=_shown(text, setting.otherwise or keys()[name].default),
        **how,
    )


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
            _accepted(self.dest.removeprefix("kv_eviction_"), names)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, names)


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that a command line has, by the names of their fields, and without the file."""
    values = {name: getattr(args, f"kv_eviction_{name}", None) for name in SETTINGS}
    return {name: value for name, value in values.items() if value is not None}


def _shown(text: str, default: object) -> str:
    """A help text with what holds where the option is not given.

    The parser's own default is None, which would be shown, did the text not hold `%(default)`.
    """
    return f"{text} (default: {default})%(default).0s"


def _read(name: str, text: str) -> int | float | str:
    """What a text says of a setting, so that the parser reports it like any other bad argument.

    A number is an int where vLLM reads one, such as 8k, else a float: 1 entry is not the fraction
    1.0.
    """
    if name == "method":
        return _method(text)
    kinds = _kinds(keys()[name].annotation)
    value: int | float | str = text
    if kinds & {int, float} and text not in words(name):
        try:
            value = human_readable_int(text) if int in kinds else float(text)
        except ValueError:
            value = _float(text)
    _accepted(name, value)
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _kinds(annotation: Any) -> set[type]:
    """Types of the values of a field."""
    if get_origin(annotation) is tuple:
        return {tuple}
    if isinstance(annotation, type):
        return {annotation}
    return {kind for part in get_args(annotation) for kind in _kinds(part)}


def _method(text: str) -> str:
    """A method, so that the parser names the nearest of an unknown one."""
    if text not in _METHODS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no method; {nearest(text, _METHODS)}the methods are {', '.join(_METHODS)}"
        )
    return text


def _accepted(name: str, value: Any) -> None:
    """Validates one setting alone."""
    try:
        EvictionConfig.parse({"method": "none", **_NEEDED.get(name, {}), name: value})
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
