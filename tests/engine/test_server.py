"""The main path over HTTP: `vllm serve --kv-eviction`, as a user starts it."""

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.engine.server import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    answering,
    blocks_held,
    post,
    readings,
    refusal,
    serving,
)
from vllm_kvselect.cli import app
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.planning.cuts import cuts

pytestmark = pytest.mark.xdist_group("server")  # one server for all
PROMPT_LEN = 1500


def test_a_long_prompt_holds_the_blocks_of_its_plan(server: str, text_tokens: list[int]) -> None:
    (cut,) = cuts(PROMPT_LEN, BLOCK_SIZE, EvictionConfig(method="adakv-perturb", budget=256))
    num_prompt_blocks = -(-PROMPT_LEN // BLOCK_SIZE)
    first = -(-(PROMPT_LEN + 1) // BLOCK_SIZE) - cut.first_packed
    assert (first, num_prompt_blocks) == (9, 47)

    def held() -> int:
        return blocks_held(server)

    with answering(server, text_tokens[:PROMPT_LEN]):
        found = readings(held, lambda n: first + 2 <= n < num_prompt_blocks)
    # The gauge lags the stream: the first readings may still be those of the prefill.
    while_answering = list(itertools.dropwhile(lambda n: n == num_prompt_blocks, found))
    assert while_answering == sorted(while_answering)
    assert while_answering[0] >= first
    readings(held, lambda n: n == 0)


def test_the_server_goes_on_after_a_request_it_cannot_serve(
    server: str, text_tokens: list[int]
) -> None:
    status, error = refusal(server, prompt=text_tokens[: MAX_MODEL_LEN + 100], max_tokens=8)
    assert status == 400
    assert str(MAX_MODEL_LEN) in error["message"]
    with post(server, prompt=text_tokens[:1000], max_tokens=8) as response:
        answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("group", "options"),
    [
        ("kv-eviction", ("--kv-eviction ", "-budget", "-allow-override", "-config", "-experts")),
        ("kv-eviction-experts", ("-window", "-alpha")),
    ],
)
def test_help_has_groups_of_its_own(
    group: str,
    options: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load_general_plugins()
    monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", None)  # what is asked for
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args([f"--help={group}"])
    said = capsys.readouterr().out
    for option in options:
        assert option in said


@pytest.mark.load  # starts a server of its own
def test_top_says_of_a_server_without_statistics_that_it_keeps_none(tmp_path: Path) -> None:
    with serving(tmp_path, "--kv-eviction", "snapkv", "--disable-log-stats") as url:
        result = CliRunner().invoke(app, ["top", "--once", "--url", url])
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: the server at {url} keeps no statistics; start it without --disable-log-stats\n"
    )
