"""The command line and `additional_config` say the same thing; the block size is ours if open."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_kvselect.config import SETTINGS, ConfigError, EvictionConfig
from vllm_kvselect.engine import start_up as report
from vllm_kvselect.engine.frontend import arguments
from vllm_kvselect.engine.scheduler.checked_scheduler import CheckedScheduler
from vllm_kvselect.engine.scheduler.cut_scheduler import CutScheduler
from vllm_kvselect.settings import option_of
from vllm_kvselect.tiny_model import tiny_model

SNAPKV_OF_ALL = ("--kv-eviction", "snapkv", "--kv-eviction-budget", "1.0")
NONE_BUT_CHOICE = ("--kv-eviction", "none", "--kv-eviction-allow-override")


@pytest.fixture(scope="module", autouse=True)
def _loggers() -> None:
    """vLLM sets up its loggers with the first configuration of a process, without our handlers."""
    parse("--dtype", "float32").create_engine_config()


def said(caplog: pytest.LogCaptureFixture, *command: str) -> list[tuple[int, str]]:
    """What the plugin logs when a configuration is made, with the levels."""
    logger = logging.getLogger("vllm.kvselect")
    caplog.clear()
    logger.addHandler(caplog.handler)
    try:
        parse("--dtype", "float32", *command).create_engine_config()
    finally:
        logger.removeHandler(caplog.handler)
    ours = [record for record in caplog.records if record.name == "vllm.kvselect"]
    # The handler hears of them a second time where vLLM's logger propagates.
    return list({id(r): (r.levelno, r.getMessage()) for r in ours}.values())


def parse(*command: str) -> EngineArgs:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    # Asked for in vain, it would be made once more where a test has a cache of its own.
    model = () if "--model" in command else ("--model", str(tiny_model()))
    args = parser.parse_args([*model, "--max-model-len", "2048", *command])
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


@pytest.mark.parametrize(
    "words",
    [("method,budget",), ("method", "budget"), ("method, budget",), ("method,", "budget")],
    ids=["commas", "words", "a comma and a blank", "a comma and a word"],
)
def test_overrides_are_a_list_of_names(words: tuple[str, ...]) -> None:
    args = parse("--kv-eviction", "none", "--kv-eviction-allow-override", *words)
    assert args.additional_config["kv_eviction"]["allow_override"] == ["method", "budget"]


def test_a_server_whose_requests_may_choose_a_method_has_our_worker() -> None:
    config: Any = parse(*NONE_BUT_CHOICE, "method").create_engine_config()
    assert config.parallel_config.worker_cls.endswith("EvictionCPUWorker")


def test_every_option_may_stand_in_the_config_file_of_vllm(tmp_path: Path) -> None:
    settings = {
        "kv-eviction": "snapkv",
        "kv-eviction-budget": 0.25,
        "kv-eviction-context": "6k",
        "kv-eviction-allow-override": ["method", "budget"],
        "kv-eviction-context-store": str(tmp_path),
        "kv-eviction-context-store-bytes": "50G",
        "kv-eviction-check-integrity": True,
    }
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(settings))
    args = parse("--config", str(file))
    assert Path(args.model) == tiny_model()
    assert args.additional_config["kv_eviction"] == {
        "method": "snapkv",
        "budget": 0.25,
        "context": 6000,
        "allow_override": ["method", "budget"],
        "context_store": str(tmp_path),
        "context_store_bytes": 50 * 2**30,
        "check_integrity": True,
    }


def test_a_flag_of_a_file_is_switched_off_on_the_command_line(tmp_path: Path) -> None:
    vllms, ours = tmp_path / "serve.yaml", tmp_path / "eviction.yaml"
    vllms.write_text("kv-eviction: snapkv\nkv-eviction-check-integrity: true\n")
    ours.write_text("method: snapkv\ncheck_integrity: true\n")
    off = "--no-kv-eviction-check-integrity"
    args = parse("--config", str(vllms), off)
    assert not EvictionConfig.parse(args.additional_config["kv_eviction"]).check_integrity
    args = parse("--kv-eviction-config", str(ours), off)
    assert args.additional_config["kv_eviction"] == {"method": "snapkv", "check_integrity": False}
    assert "kv_eviction" not in parse(off).additional_config


@pytest.mark.parametrize("text", ["50G", "50g", "1.5g", "1000000"])
def test_numbers_are_read_as_vllm_reads_its_own(text: str) -> None:
    options = ("--kv-cache-memory-bytes", text, "--kv-eviction", "adakv")
    for name in ("budget", "context-store-bytes"):
        args = parse(*options, f"--kv-eviction-{name}", text, "--kv-eviction-context-store", "f")
        value = args.additional_config["kv_eviction"][name.replace("-", "_")]
        assert value == args.kv_cache_memory_bytes


def test_help_shows_what_holds_where_an_option_is_not_given() -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        if "KV-Eviction" in (group.title or ""):
            formatter.add_arguments(group._group_actions)
    text = " ".join(formatter.format_help().split())
    for option, default in (
        ("--kv-eviction METHOD", "auto with another of these options, else none"),
        ("--kv-eviction-budget", EvictionConfig(method="none").budget),
        ("--kv-eviction-window", EvictionConfig(method="none").window),
        ("--kv-eviction-alpha", EvictionConfig(method="none").alpha),
        ("--kv-eviction-allow-override", "nothing"),
        ("--kv-eviction-check-integrity", "off"),
    ):
        help_text = text.split(f"{option}", 1)[1].split(" --kv-", 1)[0]
        assert help_text.endswith(f"(default: {default})")
    assert "None" not in text


def test_vllms_help_shows_what_operators_need_and_where_the_rest_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    shown = []
    for title in ("kv-eviction", "kv-eviction-experts"):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--help={title}"])
        shown.append(capsys.readouterr().out)
    operators, experts = shown
    assert "--help=kv-eviction-experts" in operators
    for name, setting in SETTINGS.items():
        option = re.compile(rf"^ +{option_of(name)}[ ,]", re.MULTILINE)
        assert bool(option.search(operators)) is setting.operator, name
        is_experts = setting.option is not None and not setting.operator
        assert bool(option.search(experts)) is is_experts, name


def test_options_and_additional_config_are_merged_where_they_agree() -> None:
    settings = {"method": "adakv", "kernel_size": 5}
    command = ["--kv-eviction", "adakv", "--kv-eviction-budget", "512", "--additional-config"]
    args = parse(*command, json.dumps({"kv_eviction": settings}))
    assert args.additional_config == {"kv_eviction": {**settings, "budget": 512}}
    # With several API servers vLLM reads the command line again, with the result in it.
    args = parse(*command, json.dumps(args.additional_config))
    assert args.additional_config == {"kv_eviction": {**settings, "budget": 512}}
    # An option may add to a method that is chosen there.
    args = parse("--kv-eviction-budget", "512", *command[-1:], '{"kv_eviction": {}}')
    assert args.additional_config == {"kv_eviction": {"budget": 512}}


@pytest.mark.parametrize(
    ("additional", "message"),
    [
        ('{"kv_eviction": 5}', r"additional_config\['kv_eviction'\] = 5 must be a mapping"),
        ('{"kv_eviction": {"budget": 512}}', r"budget = 1 by .*contradicts.* = 512; give it once"),
        ('{"kv_eviction": {"budget": 1.0}}', r"budget = 1 by .*contradicts.* = 1\.0"),
        ("[5]", r"additional_config = '\[5\]' must be a mapping beside --kv-eviction"),
    ],
)
def test_options_and_additional_config_that_contradict_are_refused(
    additional: str, message: str
) -> None:
    options = ["--kv-eviction", "adakv", "--kv-eviction-budget", "1"]
    with pytest.raises(ConfigError, match=message):
        parse(*options, "--additional-config", additional)


class Settings:
    """Settings of somebody's own, which vLLM accepts for the sake of their hash."""

    def compute_hash(self) -> str:
        return "abc"


def test_settings_of_a_stock_engine_may_be_any_object() -> None:
    settings: Any = Settings()
    args = EngineArgs(str(tiny_model()), max_model_len=2048, additional_config=settings)
    config = args.create_engine_config()
    assert config.additional_config is settings
    assert arguments.requested(config) is None
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"


def test_a_budget_of_one_is_an_entry_and_one_point_zero_is_everything() -> None:
    for text, budget in (("1024", 1024), ("0.2", 0.2), ("1", 1), ("1.0", 1.0)):
        args = parse("--kv-eviction", "adakv", "--kv-eviction-budget", text)
        value = args.additional_config["kv_eviction"]["budget"]
        assert (value, type(value)) == (budget, type(budget))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("--kv-eviction", "snapkw"), "'snapkw' is no method; did you mean 'snapkv'?"),
        (("--kv-eviction", "adakv", "--kv-eviction-budget", "1.5"), "budget = 1.5 is not accepted"),
        (("--kv-eviction", "adakv", "--kv-eviction-budget", "many"), "'many' is not a number"),
        (("--kv-eviction", "adakv", "--kv-eviction-alpha", "x"), "'x' is not a number"),
        (("--kv-eviction", "adakv", "--kv-eviction-allow-override", ","), "at least one name"),
        (("--kv-eviction", "adakv", "--kv-eviction-context-store-bytes", "5e10"), "valid integer"),
        (("--kv-eviction", "adakv", "--kv-eviction-budget", "1.5G"), "Decimals are not allowed"),
    ],
)
def test_bad_options_end_with_one_line(
    command: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*command)
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "method"),
    [
        (("--kv-eviction-budget", "512"), "layer-probe"),
        (("--kv-eviction-allow-override", "method"), "layer-probe"),
        (("--additional-config", '{"kv_eviction": {}}'), "layer-probe"),
        (("--kv-prefill", "critiprefill", "--kv-eviction-budget", "512"), "layer-probe"),
        (("--kv-prefill", "critiprefill"), "none"),
        (("--kv-prefill-budget", "512", "--kv-eviction-allow-override", "prefill"), "none"),
    ],
)
def test_where_no_method_is_named_auto_chooses_one_unless_all_is_of_the_prefill(
    command: tuple[str, ...], method: str
) -> None:
    config: Any = parse(*command).create_engine_config()
    assert config.additional_config["kv_eviction"]["method"] == method


def test_settings_of_a_sparse_prefill_that_nobody_asks_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="prefill_budget = 512 has no effect without prefill"):
        parse("--kv-prefill-budget", "512").create_engine_config()


def test_integrity_check_takes_the_place_of_the_scheduler() -> None:
    args = parse("--kv-eviction", "adakv", "--kv-eviction-check-integrity")
    assert args.additional_config["kv_eviction"]["check_integrity"] is True
    scheduler = args.create_engine_config().scheduler_config.get_scheduler_cls()
    assert scheduler is CheckedScheduler
    unchecked: Any = parse("--kv-eviction", "adakv").create_engine_config()
    assert unchecked.scheduler_config.get_scheduler_cls() is CutScheduler
    stock: Any = parse().create_engine_config()
    assert stock.scheduler_config.get_scheduler_cls() is Scheduler


@pytest.mark.parametrize("command", [(), ("--kv-eviction", "none")])
def test_without_eviction_nothing_changes(command: tuple[str, ...]) -> None:
    config: Any = parse(*command).create_engine_config()
    assert not config.cache_config.user_specified_block_size
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"


def test_a_block_size_of_the_user_stays() -> None:
    config: Any = parse("--kv-eviction", "adakv", "--block-size", "64").create_engine_config()
    assert config.cache_config.block_size == 64


def test_start_up_says_what_is_retained_and_freed(caplog: pytest.LogCaptureFixture) -> None:
    # 2,048 tokens are 64 blocks; the tail begins at block 63, 7 more are packed, 56 are freed.
    assert said(caplog, "--kv-eviction", "adakv", "--kv-eviction-budget", "256") == [
        (
            logging.INFO,
            "KV eviction adakv: retains 256 entries per KV head and layer (window 32 included) of "
            "a prompt of 2048 tokens; frees 56 of its 64 blocks, 78.8 of 90.0 MiB",
        )
    ]


def test_start_up_says_how_answers_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    rounds = ("--kv-eviction-decode-budget", "512", "--kv-eviction-decode-interval", "64")
    ((level, line),) = said(caplog, "--kv-eviction", "snapkv", *rounds)
    assert level == logging.INFO
    assert line.endswith("; brings requests that generate back to 512 entries every 64 tokens")
    config: Any = parse("--kv-eviction", "snapkv", *rounds).create_engine_config()
    assert config.scheduler_config.get_scheduler_cls() is CutScheduler


# Blocks have 32 tokens.
@pytest.mark.parametrize("interval", ["128", "97"])
def test_start_up_says_how_prompts_are_bounded(
    interval: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = ("--kv-eviction-budget", "256", "--kv-eviction-prompt-interval", interval)
    ((level, line),) = said(caplog, "--kv-eviction", "layer-keydiff", *options)
    assert level == logging.INFO
    # The budget and two intervals.
    assert "drops while it is computed every 128 tokens, so that it never holds more than" in line
    assert "more than 16 blocks, 22.5 MiB" in line
    assert line.endswith("--kv-eviction-decode-budget too, --max-model-len may exceed the pool")


def test_start_up_warns_of_windows_inside_prompts(caplog: pytest.LogCaptureFixture) -> None:
    _, (level, line) = said(caplog, "--kv-eviction", "adakv", "--kv-eviction-prompt-interval", "64")
    assert level == logging.WARNING
    assert line.startswith("KV eviction adakv judges entries by the tokens after them")


@pytest.mark.parametrize(
    ("options", "retained"),
    [
        (("--kv-eviction", "adakv", "--kv-eviction-budget", "2048"), "2048 retains 2048"),
        (("--kv-eviction", "adakv", "--kv-eviction-budget", "9999"), "9999 retains 2048"),
        (("--kv-eviction", "adakv", "--kv-eviction-budget", "2017"), "2017 retains 2017"),
        (("--kv-eviction", "snapkv", "--kv-eviction-budget", "1.0"), "1.0 retains 2048"),
        ((*NONE_BUT_CHOICE, "method", "--kv-eviction-budget", "2048"), "2048 retains 2048"),
    ],
)
def test_a_server_that_can_never_drop_anything_warns(
    options: tuple[str, ...], retained: str, caplog: pytest.LogCaptureFixture
) -> None:
    ((level, message),) = said(caplog, *options)
    assert level == logging.WARNING
    assert "never drops anything here: the longest prompt (--max-model-len) has 2048" in message
    assert f"a budget of {retained} of them" in message
    assert message.endswith("lower --kv-eviction-budget")


@pytest.mark.parametrize(
    "options",
    [
        ("--kv-eviction", "adakv", "--kv-eviction-budget", "2016"),
        (*NONE_BUT_CHOICE, "method"),
        (*NONE_BUT_CHOICE, "method,budget", "--kv-eviction-budget", "2048"),
        (*SNAPKV_OF_ALL, "--kv-eviction-decode-budget", "512"),
        (*SNAPKV_OF_ALL, "--kv-eviction-allow-override", "decode_budget"),
    ],
)
def test_a_server_that_may_drop_something_does_not_warn(
    options: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert [level for level, _ in said(caplog, *options)] == [logging.INFO]


@pytest.mark.parametrize(
    ("dtype", "fast", "warns"),
    [
        ("bfloat16", torch.float32, True),
        ("float16", torch.float32, True),
        ("float32", torch.float32, False),
        ("bfloat16", torch.bfloat16, False),
        ("float16", torch.bfloat16, False),
    ],
)
def test_a_slow_data_type_is_said_once_with_the_option_that_changes_it(
    dtype: str,
    fast: torch.dtype,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "fast_dtype", lambda: fast)
    messages = [text for _, text in said(caplog, "--kv-eviction", "adakv", "--dtype", dtype)]
    slow = [text for text in messages if f"no instructions for {dtype}" in text]
    assert len(slow) == warns
    assert all("add --dtype float32" in text for text in slow)
    assert said(caplog, "--dtype", dtype) == []  # nor without eviction
