"""The command line and `additional_config` say the same thing; the block size is ours if open."""

import logging
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_kvselect.config import ConfigError, EvictionConfig
from vllm_kvselect.engine.checked_scheduler import CheckedScheduler
from vllm_kvselect.tiny_model import tiny_model


def parse(*command: str) -> EngineArgs:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", str(tiny_model()), "--max-model-len", "2048", *command])
    return AsyncEngineArgs.from_cli_args(args)


def test_options_reach_every_process_in_additional_config(tmp_path: Path) -> None:
    file = tmp_path / "eviction.yaml"
    file.write_text("method: snapkv\nbudget: 0.25\nkernel_size: 5\n")
    command = ["--kv-eviction", "adakv", "--kv-eviction-alpha", "0.25", "--additional-config"]
    args = parse(*command, '{"other": 1}', "--kv-eviction-config", str(file))
    eviction = {"method": "adakv", "budget": 0.25, "kernel_size": 5, "alpha": 0.25}
    assert args.additional_config == {"other": 1, "kv_eviction": eviction}
    config = args.create_engine_config()
    assert config.additional_config["kv_eviction"] == EvictionConfig(**eviction).model_dump()
    assert config.cache_config.block_size == 32


def test_options_reach_processes_that_load_plugins_after_reading_the_command_line() -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", str(tiny_model()), "--kv-eviction", "snapkv"])
    AsyncEngineArgs.from_cli_args(args)
    later: Any = EngineArgs.from_cli_args.__wrapped__(AsyncEngineArgs, args)  # vLLM's own
    assert later.additional_config == {"kv_eviction": {"method": "snapkv"}}


def test_overrides_are_a_list_of_names() -> None:
    command = ["--kv-eviction", "none", "--kv-eviction-allow-override", "method,budget"]
    args = parse(*command)
    assert args.additional_config["kv_eviction"]["allow_override"] == ["method", "budget"]
    config: Any = args.create_engine_config()
    assert config.parallel_config.worker_cls.endswith("EvictionCPUWorker")


def test_a_budget_of_one_is_an_entry_and_one_point_zero_is_everything() -> None:
    for text, budget in (("1024", 1024), ("0.2", 0.2), ("1", 1), ("1.0", 1.0)):
        args = parse("--kv-eviction", "adakv", "--kv-eviction-budget", text)
        value = args.additional_config["kv_eviction"]["budget"]
        assert (value, type(value)) == (budget, type(budget))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("--kv-eviction", "snapkw"), "invalid choice: 'snapkw'"),
        (("--kv-eviction", "adakv", "--kv-eviction-budget", "1.5"), "budget = 1.5 is not accepted"),
        (("--kv-eviction", "adakv", "--kv-eviction-budget", "0"), "budget = 0 is not accepted"),
        (("--kv-eviction", "adakv", "--kv-eviction-budget", "many"), "invalid"),
        (("--kv-eviction", "adakv", "--kv-eviction-window", "0"), "window = 0 is not accepted"),
        (("--kv-eviction", "adakv", "--kv-eviction-alpha", "2"), "alpha = 2.0 is not accepted"),
        (
            ("--kv-eviction", "adakv", "--kv-eviction-allow-override", "window"),
            "allow_override = 'window' is not accepted",
        ),
    ],
)
def test_bad_options_end_with_one_line(
    command: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*command)
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_options_without_a_method_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-eviction-budget has no effect without"):
        parse("--kv-eviction-budget", "512")


def test_integrity_check_takes_the_place_of_the_scheduler() -> None:
    args = parse("--kv-eviction", "adakv", "--kv-eviction-check-integrity")
    assert args.additional_config["kv_eviction"]["check_integrity"] is True
    scheduler = args.create_engine_config().scheduler_config.get_scheduler_cls()
    assert scheduler is CheckedScheduler
    stock: Any = parse("--kv-eviction", "adakv").create_engine_config()
    assert stock.scheduler_config.get_scheduler_cls() is Scheduler


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.yaml"):
        parse("--kv-eviction-config", str(tmp_path / "nowhere.yaml"))


@pytest.mark.parametrize("command", [(), ("--kv-eviction", "none")])
def test_without_eviction_nothing_changes(command: tuple[str, ...]) -> None:
    config: Any = parse(*command).create_engine_config()
    assert config.cache_config.block_size == 128
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"


def test_a_block_size_of_the_user_stays() -> None:
    config: Any = parse("--kv-eviction", "adakv", "--block-size", "64").create_engine_config()
    assert config.cache_config.block_size == 64


def test_start_up_says_what_is_retained_and_freed(caplog: pytest.LogCaptureFixture) -> None:
    args = parse("--kv-eviction", "adakv", "--kv-eviction-budget", "256")
    logger = logging.getLogger("vllm.kvselect")
    logger.addHandler(caplog.handler)
    try:
        args.create_engine_config()
    finally:
        logger.removeHandler(caplog.handler)
    # 2,048 tokens are 64 blocks; the tail begins at block 63, 7 more are packed, 56 are freed.
    assert caplog.messages[-1] == (
        "KV eviction adakv: retains 256 entries per KV head and layer (window 32 included) of a "
        "prompt of 2048 tokens; frees 56 of its 64 blocks, 39.4 of 45.0 MiB"
    )
