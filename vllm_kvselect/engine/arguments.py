"""From the command line or `additional_config` to a checked configuration of the whole engine.

`add_cli_args`, `from_cli_args`, `before_engine_config` and `after_engine_config` are the four
points of patches/0001 at which vLLM would call a plugin.
"""

import argparse
from typing import Any

from vllm.config import SchedulerConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

from vllm_kvselect.config import (
    CONFIG_KEY,
    METHOD_NAMES,
    OVERRIDE_NAMES,
    ConfigError,
    EvictionConfig,
)
from vllm_kvselect.engine.checks import may_pool, refuse_unsupported
from vllm_kvselect.engine.platforms import PLATFORMS, platform, platform_name
from vllm_kvselect.retention import budget_entries, cuts

logger = init_logger("vllm.kvselect")  # below "vllm", so that vLLM's logging settings apply

_ENGINE = "vllm_kvselect.engine"
_POOL_SCHEDULERS = {
    False: f"{_ENGINE}.pool_scheduler.PoolScheduler",
    True: f"{_ENGINE}.pool_scheduler.PoolAsyncScheduler",
}
_CHECKED_SCHEDULERS = {
    False: f"{_ENGINE}.checked_scheduler.CheckedScheduler",
    True: f"{_ENGINE}.checked_scheduler.CheckedAsyncScheduler",
}


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
        choices=METHOD_NAMES,
        help="Method that chooses the entries; 'none' is stock vLLM.",
    )
    group.add_argument(
        "--kv-eviction-budget",
        type=lambda text: _field("budget", _number(text)),
        metavar="ENTRIES|FRACTION",
        help="Entries retained per KV head and layer, window included: a number (1024) or a "
        "fraction of the prompt (0.2).",
    )
    group.add_argument(
        "--kv-eviction-window",
        type=lambda text: _field("window", _number(text)),
        metavar="TOKENS",
        help="Last prompt tokens, whose queries score the entries before them.",
    )
    group.add_argument(
        "--kv-eviction-alpha",
        type=lambda text: _field("alpha", float(text)),
        metavar="SHARE",
        help="Share of the budget that the first of two stages fills ('-perturb' methods).",
    )
    group.add_argument(
        "--kv-eviction-allow-override",
        type=lambda text: _field("allow_override", text.split(",")),
        metavar="FIELD[,FIELD]",
        help=f"What a request may choose for itself: {', '.join(OVERRIDE_NAMES)}. Nothing by "
        "default.",
    )
    group.add_argument(
        "--kv-eviction-check-integrity",
        action="store_true",
        default=None,
        help="Check all KV cache blocks after every step; stop requests whose blocks are wrong.",
    )
    group.add_argument(
        "--kv-eviction-config",
        metavar="FILE",
        help="YAML file with these and further settings; options on the command line win.",
    )


def from_cli_args(engine_args: EngineArgs, args: argparse.Namespace) -> None:
    """Hands the options to the engine: they travel to every process in `additional_config`.

    With several API servers vLLM gives each of them the command line before it loads plugins there,
    so the options are written there too, as if they had come in `--additional-config`.

    Args:
        engine_args: vLLM's engine arguments, changed in place.
        args: The parsed command line, changed in place.

    Raises:
        ConfigError: If the file is unreadable or an option is given without a method.
    """
    values = _values(args)
    if values is not None:
        additional = engine_args.additional_config or {}
        args.additional_config = {**additional, CONFIG_KEY: values}
        engine_args.additional_config = args.additional_config


def _values(args: argparse.Namespace) -> dict[str, Any] | None:
    """What the command line and its file say; None when eviction is not asked for.

    Raises:
        ConfigError: If the file is unreadable or an option is given without a method.
    """
    flags = {
        name: value
        for name in (
            "method",
            "budget",
            "window",
            "alpha",
            "allow_override",
            "check_integrity",
        )
        if (value := getattr(args, f"kv_eviction_{name}", None)) is not None
    }
    path = getattr(args, "kv_eviction_config", None)
    if path is not None:
        return EvictionConfig.read_file(path) | flags
    if flags and "method" not in flags:
        names = ", ".join(f"--kv-eviction-{name.replace('_', '-')}" for name in flags)
        raise ConfigError(
            f"{names} has no effect without --kv-eviction; accepted methods: "
            f"{', '.join(METHOD_NAMES)}"
        )
    return flags or None


def requested(engine_args: EngineArgs) -> EvictionConfig | None:
    """The eviction that an engine is asked for.

    Args:
        engine_args: vLLM's engine arguments.

    Returns:
        The validated configuration, or None for a stock engine.

    Raises:
        ConfigError: If the values are not accepted.
    """
    values = (engine_args.additional_config or {}).get(CONFIG_KEY)
    if values is None:
        return None
    if not isinstance(values, dict):
        raise ConfigError(
            f"additional_config[{CONFIG_KEY!r}] = {values!r} must be a mapping such as "
            '{"method": "adakv-perturb", "budget": 1024}'
        )
    eviction = EvictionConfig.parse(values)
    return eviction if eviction.may_evict else None


def server_config(vllm_config: VllmConfig) -> EvictionConfig | None:
    """The eviction of an engine that was configured, or None for a stock one."""
    additional = vllm_config.additional_config
    # vLLM lets a platform put an object of its own here.
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        return None
    eviction = EvictionConfig.parse(additional[CONFIG_KEY])
    return eviction if eviction.may_evict else None


def before_engine_config(engine_args: EngineArgs) -> None:
    """Validates the request and fills in what the user left open.

    Args:
        engine_args: vLLM's engine arguments, changed in place.

    Raises:
        ConfigError: If the values are not accepted.
    """
    here = platform()
    if requested(engine_args) is not None and engine_args.block_size is None and here is not None:
        engine_args.block_size = here.default_block_size


def after_engine_config(engine_args: EngineArgs, vllm_config: VllmConfig) -> None:
    """Checks vLLM's finished configuration and makes its workers ours.

    Args:
        engine_args: vLLM's engine arguments.
        vllm_config: Their configuration, changed in place.

    Raises:
        ConfigError: If something cannot be honoured.
    """
    eviction = requested(engine_args)
    if eviction is None:
        return
    refuse_unsupported(vllm_config, eviction)
    vllm_config.additional_config[CONFIG_KEY] = eviction.model_dump()
    here = PLATFORMS[platform_name()]
    vllm_config.parallel_config.worker_cls = here.worker
    if platform_name() == "cuda":
        # One that ours stand in for; on some devices vLLM would prefer another.
        attention = vllm_config.attention_config
        attention.backend = attention.backend or next(iter(here.backends))
    choose_scheduler(vllm_config.scheduler_config, eviction)
    logger.info("%s", describe(vllm_config, eviction))


def choose_scheduler(scheduling: SchedulerConfig, eviction: EvictionConfig) -> None:
    """Takes a scheduler of ours where the integrity check or a pool across layers needs one.

    Args:
        scheduling: vLLM's configuration of the scheduler, changed in place.
        eviction: The validated configuration.
    """
    is_async = bool(scheduling.async_scheduling)
    if eviction.check_integrity:
        scheduling.scheduler_cls = _CHECKED_SCHEDULERS[is_async]
    elif may_pool(eviction) and scheduling.scheduler_cls is None:
        scheduling.scheduler_cls = _POOL_SCHEDULERS[is_async]


def describe(vllm_config: VllmConfig, eviction: EvictionConfig) -> str:
    """One line on what is retained and what that frees, for a prompt of `max_model_len`."""
    num_tokens = vllm_config.model_config.max_model_len
    block_size = vllm_config.cache_config.block_size
    num_bytes = block_bytes(vllm_config)
    num_blocks = -(-num_tokens // block_size)
    num_freed = cuts(num_tokens, block_size, eviction).num_freed(num_tokens)
    choice = ""
    if eviction.allow_override:
        choice = f"; requests may choose their {' and '.join(eviction.allow_override)}"
    if not eviction.enabled:
        return f"KV eviction none: retains everything{choice}"
    return (
        f"KV eviction {eviction.method}: retains {budget_entries(num_tokens, eviction)} entries "
        f"per KV head and layer (window {eviction.window} included) of a prompt of {num_tokens} "
        f"tokens; frees {num_freed} of its {num_blocks} blocks, "
        f"{num_freed * num_bytes / 2**20:.1f} of {num_blocks * num_bytes / 2**20:.1f} MiB{choice}"
    )


def block_entries(vllm_config: VllmConfig) -> int:
    """Entries in a block, of all layers with full attention and of all ranks together.

    Where there are fewer KV heads than ranks, vLLM gives each of these a copy, and each counts.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    num_layers = model.get_total_num_hidden_layers()
    layer_types = getattr(model.hf_text_config, "layer_types", None)
    if layer_types is not None:
        num_layers = layer_types[:num_layers].count("full_attention")
    num_heads = model.get_num_kv_heads(parallel) * parallel.tensor_parallel_size
    return vllm_config.cache_config.block_size * num_layers * num_heads


def block_bytes(vllm_config: VllmConfig) -> int:
    """Bytes that these entries take."""
    model = vllm_config.model_config
    dtype = kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, model)
    return block_entries(vllm_config) * 2 * model.get_head_size() * dtype.itemsize


def _number(text: str) -> int | float:
    """An int where the text is one, else a float: 1 entry is not the fraction 1.0."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def _field(name: str, value: Any) -> Any:
    """Validates one field, so that the parser reports it like any other bad argument."""
    try:
        EvictionConfig.parse({name: value})
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return value
