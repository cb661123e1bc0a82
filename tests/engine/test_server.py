"""The main path over HTTP: `vllm serve --kv-eviction`, as a user starts it."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.server import blocks_held, post, refusal
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.retention import plan

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("server")]  # one server for all
PROMPT_LEN, NUM_OUTPUT = 1500, 300  # long enough to be looked at while it runs


def test_a_long_prompt_holds_the_blocks_of_its_plan(server: str, text_tokens: list[int]) -> None:
    prompt = text_tokens[:PROMPT_LEN]
    with post(server, prompt=prompt, max_tokens=NUM_OUTPUT, ignore_eos=True, stream=True) as stream:
        for _ in range(3):
            stream.readline()  # two tokens, so the gauge has seen the first
        readings = list(iter(lambda: blocks_held(server), 0))  # until the request is gone
    retained = plan(PROMPT_LEN, 32, EvictionConfig(budget=256))
    assert retained is not None
    ends = (PROMPT_LEN + 1, PROMPT_LEN + NUM_OUTPUT)
    first, last = (-(-n // 32) - retained.first_packed for n in ends)
    assert (first, -(-PROMPT_LEN // 32)) == (9, 47)
    # The gauge lags the stream: the first readings may still be those of the prefill.
    while_decoding = list(itertools.dropwhile(lambda num_blocks: num_blocks == 47, readings))
    assert while_decoding
    assert set(while_decoding) <= set(range(first, last + 1))


def test_the_server_goes_on_after_a_request_it_cannot_serve(
    server: str, text_tokens: list[int]
) -> None:
    status, error = refusal(server, prompt=text_tokens[:3000], max_tokens=8)
    assert status == 400
    assert "2048" in error["message"]
    with post(server, prompt=text_tokens[:1000], max_tokens=8) as response:
        answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == 8


def test_help_has_a_group_of_its_own() -> None:
    vllm = Path(sys.executable).with_name("vllm")
    command = [vllm, "serve", "--help=KVEviction"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    for option in ("--kv-eviction ", "-budget", "-window", "-alpha", "-allow-override", "-config"):
        assert option in result.stdout
