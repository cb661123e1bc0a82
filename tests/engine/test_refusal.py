"""A start that is refused ends with one line, whichever process refuses; a library raises."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.marks import starts_engine
from vllm_kvselect.config import ConfigError
from vllm_kvselect.engine import refusal
from vllm_kvselect.tiny_model import tiny_model

CONNECTOR = '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'
ADAKV = ("--kv-eviction", "adakv")


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process of a command in which nothing has happened yet, with a folder for its notes."""
    load_general_plugins()
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/vllm", "serve"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def start(*command: str) -> None:
    """Makes a configuration as `vllm serve` does, with an error that nobody catches."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    model = ["--model", str(tiny_model()), "--max-model-len", "2048", "--dtype", "float32"]
    try:
        AsyncEngineArgs.from_cli_args(parser.parse_args([*model, *command])).create_engine_config()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("--kv-eviction-config", "nowhere.yaml"), "cannot read nowhere.yaml: No such file"),
        (("--kv-prefill-budget", "512"), "prefill_budget = 512 has no effect without prefill"),
        ((*ADAKV, "--kv-eviction-budget", "40"), "budget = 40 retains 40 entries"),
        ((*ADAKV, "--worker-cls", "my.Worker"), "worker_cls = 'my.Worker' replaces the worker"),
        (
            (*ADAKV, "--kv-transfer-config", CONNECTOR),
            "KV connectors (--kv-transfer-config) is not",
        ),
        ((*ADAKV, "--additional-config", '{"kv_eviction": 5}'), "must be a mapping such as"),
        (("--additional-config", '{"kv_eviction": {"budgets": 5}}'), "unknown key 'budgets'"),
    ],
)
def test_what_a_command_refuses_is_one_line(
    command: tuple[str, ...], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    start(*command)
    *_, last = capfd.readouterr().err.splitlines()
    assert last.startswith("vllm: error: ")
    assert reason in last


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [1\nb: 2", "is not valid YAML, line 2, column 2: expected ',' or ']', but got ':'"),
        ("budget: many", "budget = 'many' is not accepted"),
        ("a: \x01", "is not valid YAML: unacceptable character"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(
    text: str, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "eviction.yaml").write_text(text)
    start("--kv-eviction-config", str(tmp_path / "eviction.yaml"))
    output = capfd.readouterr().err
    assert reason in output.splitlines()[-1]
    assert "Traceback" not in output


def test_other_errors_are_shown_as_ever(capfd: pytest.CaptureFixture[str]) -> None:
    start(*ADAKV, "--max-model-len", "999999999")
    output = capfd.readouterr().err
    assert "Traceback" in output
    assert "vllm: error" not in output


def test_a_library_raises_and_shows_errors_as_ever() -> None:
    args = EngineArgs(str(tiny_model()), additional_config={"kv_eviction": {"budget": 40}})
    with pytest.raises(ConfigError, match="budget = 40 retains 40"):
        args.create_engine_config()
    assert sys.excepthook is sys.__excepthook__


def test_a_command_without_eviction_shows_errors_as_ever() -> None:
    start()
    assert sys.excepthook is sys.__excepthook__


class Worker:
    vllm_config: Any = SimpleNamespace(instance_id="abcde")

    @refusal.notes_refusals
    def load_model(self) -> None:
        raise ConfigError("layers\ntoo odd")


def test_what_a_worker_refuses_is_the_last_line_of_the_command(
    capfd: pytest.CaptureFixture[str],
) -> None:
    refusal.end_with_one_line()
    refusal.expect_note(Worker.vllm_config)
    error = RuntimeError("Engine core initialization failed. See root cause above.")
    sys.excepthook(RuntimeError, error, None)
    assert "RuntimeError" in capfd.readouterr().err  # the worker has refused nothing yet
    for _ in range(2):  # every rank
        with pytest.raises(ConfigError):
            Worker().load_model()
    sys.excepthook(RuntimeError, error, None)
    assert capfd.readouterr().err == "vllm: error: layers too odd\n"


def test_a_worker_writes_only_where_its_command_made_a_note(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.touch()
    (tmp_path / "vllm-kvselect-abcde").symlink_to(target)
    with pytest.raises(ConfigError):
        Worker().load_model()
    assert target.read_text() == ""
    (tmp_path / "vllm-kvselect-abcde").unlink()
    refusal.expect_note(Worker.vllm_config)  # by a library: nobody will read it
    with pytest.raises(ConfigError):
        Worker().load_model()
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@starts_engine
def serve(folder: Path, model: Path, *options: str) -> tuple[int, str]:
    """Status and output of a server that does not start, and whose notes are in a folder."""
    command = [Path(sys.executable).with_name("vllm"), "serve", model, "--dtype", "float32"]
    command += ["--max-model-len", "1024", "--enforce-eager", "--skip-tokenizer-init", *options]
    result = subprocess.run(
        [str(part) for part in command],
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    return result.returncode, result.stdout


def test_a_server_refused_in_its_own_process_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "eviction.yaml").write_text("budget: [1\nwindow: 2")
    options = ("--kv-eviction-config", str(tmp_path / "eviction.yaml"))
    status, output = serve(tmp_path, tiny_model(), *options)
    assert status == 1
    assert "Traceback" not in output
    assert output.splitlines()[-1].startswith("vllm: error: ")
    assert "is not valid YAML, line 2, column 7" in output.splitlines()[-1]


def test_a_server_refused_by_its_worker_ends_with_the_reason(tmp_path: Path) -> None:
    """ALiBi is seen only once the layers are made: two processes away from the command."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=512, hidden_size=128, n_layer=2, n_head=4)
    BloomForCausalLM(config).save_pretrained(tmp_path / "model")
    memory = ("--kv-cache-memory-bytes", "64M", "--kv-eviction-budget", "128")
    # The name of the folder leaves room for the names of vLLM's sockets.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        status, output = serve(Path(folder), tmp_path / "model", *ADAKV, *memory)
        assert not list(Path(folder).glob("vllm-kvselect-*"))
    assert status == 1
    assert output.splitlines()[-1] == (
        "vllm: error: kv_eviction does not support layers with ALiBi; serve this model without "
        "--kv-eviction"
    )
