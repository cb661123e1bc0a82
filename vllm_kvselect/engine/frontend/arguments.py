"""From the command line or `additional_config` to a checked configuration of the whole engine.

`add_cli_args`, `from_cli_args`, `before_engine_config` and `after_engine_config` are the four
points of patches/0001 at which vLLM would call a plugin.
"""

import argparse
from typing import Any

from vllm.config import SchedulerConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_kvselect.config import CONFIG_KEY, ConfigError, EvictionConfig, with_a_method
from vllm_kvselect.engine import refusal
from vllm_kvselect.engine import start_up as report
from vllm_kvselect.engine.cuda.backends import choose_backend, log_backend
from vllm_kvselect.engine.frontend import auto
from vllm_kvselect.engine.frontend.checks import refuse_unsupported
from vllm_kvselect.engine.frontend.options import add_cli_args as add_cli_args
from vllm_kvselect.engine.frontend.options import given_options
from vllm_kvselect.engine.platforms import PLATFORMS, platform, platform_name

_SCHEDULERS = {
    (False, False): "cut_scheduler.CutScheduler",
    (False, True): "cut_scheduler.CutAsyncScheduler",
    (True, False): "checked_scheduler.CheckedScheduler",
    (True, True): "checked_scheduler.CheckedAsyncScheduler",
}
"""In `engine/scheduler`, by whether they check, and whether they schedule asynchronously."""


def from_cli_args(engine_args: EngineArgs, args: argparse.Namespace) -> None:
    """Hands the options to the engine: they travel to every process in `additional_config`.

    With several API servers vLLM gives each of them the command line before it loads plugins there,
    so the options are written there too, as if they had come in `--additional-config`. Both
    arguments are changed in place.

    Raises:
        ConfigError: If the file is unreadable, or `--additional-config` says something else.
    """
    options = given_options(args)
    path, additional = getattr(args, "kv_eviction_config", None), engine_args.additional_config
    settings = _settings(additional)
    if path is None and settings is None:  # there is nothing that could be switched off
        options = {name: value for name, value in options.items() if value is not False}
    if options or path is not None or settings is not None:
        refusal.end_with_one_line()
    if not options and path is None:
        return
    if additional and not isinstance(additional, dict):
        raise ConfigError(
            f"additional_config = {additional!r} must be a mapping beside --kv-eviction, whose "
            "settings travel in it"
        )
    if path is not None:
        options = EvictionConfig.read_file(path) | options
    args.additional_config = {
        **(additional or {}),
        CONFIG_KEY: _merged(_mapping(settings or {}), options),
    }
    engine_args.additional_config = args.additional_config


def _merged(settings: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What `--additional-config` and the options say together.

    Neither wins over the other, because neither is known to be what the user meant.

    Raises:
        ConfigError: If they contradict each other.
    """
    for name in settings.keys() & options.keys():
        # An int and the float that equals it are different budgets: 1 entry, and all of the prompt.
        if repr(settings[name]) != repr(options[name]):
            raise ConfigError(
                f"{name} = {options[name]!r} by --kv-eviction... contradicts "
                f"additional_config[{CONFIG_KEY!r}][{name!r}] = {settings[name]!r}; give it once"
            )
    return settings | options


def requested(config: EngineArgs | VllmConfig) -> EvictionConfig | None:
    """The validated eviction of an engine, asked for or configured, or None for a stock one.

    Raises:
        ConfigError: If the values are not accepted.
    """
    settings = _settings(config.additional_config)
    if settings is None:
        return None
    eviction = EvictionConfig.parse(auto.provisional(with_a_method(_mapping(settings))))
    return eviction if eviction.may_act else None


def _settings(additional: object) -> object:
    """What stands under our key, or None; vLLM accepts any object that has a hash instead."""
    return additional.get(CONFIG_KEY) if isinstance(additional, dict) else None


def _mapping(settings: object) -> dict[str, Any]:
    if not isinstance(settings, dict):
        raise ConfigError(
            f"additional_config[{CONFIG_KEY!r}] = {settings!r} must be a mapping such as "
            '{"budget": 0.25}'
        )
    return settings


def before_engine_config(engine_args: EngineArgs) -> None:
    """Validates the request and fills in what the user left open.

    Raises:
        ConfigError: If the values are not accepted.
    """
    here = platform()
    if requested(engine_args) is not None and engine_args.block_size is None and here is not None:
        engine_args.block_size = here.default_block_size


def after_engine_config(engine_args: EngineArgs, vllm_config: VllmConfig) -> None:
    """Checks vLLM's finished configuration and makes its workers ours.

    Raises:
        ConfigError: If something cannot be honoured.
    """
    eviction = requested(engine_args)
    if eviction is None:
        return
    choice = ""
    if auto.is_auto(with_a_method(engine_args.additional_config[CONFIG_KEY])):
        eviction, choice = auto.choose(vllm_config, eviction)
    refuse_unsupported(vllm_config, eviction)
    vllm_config.additional_config[CONFIG_KEY] = eviction.model_dump()
    here = PLATFORMS[platform_name()]
    vllm_config.parallel_config.worker_cls = here.worker
    if platform_name() == "cuda":
        attention = vllm_config.attention_config
        attention.backend = attention.backend or choose_backend(vllm_config)
        log_backend(vllm_config)
    choose_scheduler(vllm_config.scheduler_config, eviction)
    report.log_start(vllm_config, eviction, choice)
    refusal.expect_note(vllm_config)


def choose_scheduler(scheduling: SchedulerConfig, eviction: EvictionConfig) -> None:
    """Takes our scheduler."""
    name = _SCHEDULERS[eviction.check_integrity, bool(scheduling.async_scheduling)]
    scheduling.scheduler_cls = f"vllm_kvselect.engine.scheduler.{name}"
