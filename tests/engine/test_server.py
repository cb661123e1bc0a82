"""The main path over HTTP: `vllm serve --kv-eviction`, as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.server import blocks_held, post, refusal
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.retention import plan

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("server")]  # one server for all
PROMPT_LEN, NUM_OUTPUT = 1500, 120


def test_a_long_prompt_holds_the_blocks_of_its_plan(server: str, text_tokens: list[int]) -> None:
    prompt = text_tokens[:PROMPT_LEN]
    held = []
    with post(server, prompt=prompt, max_tokens=NUM_OUTPUT, ignore_eos=True, stream=True) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                held.append(blocks_held(server))
    retained = plan(PROMPT_LEN, 32, EvictionConfig(budget=256))
    assert retained is not None
    first, last = (-(-n // 32) - retained.first_packed for n in (PROMPT_LEN + 1, PROMPT_LEN + 120))
    # The gauge lags the stream: the first readings may be those of the prefill, and when the last
    # lines are read the request may be gone.
    while_decoding = [num_blocks for num_blocks in held[5:] if num_blocks]
    assert while_decoding
    assert set(while_decoding) <= set(range(first, last + 1))
    assert (first, -(-PROMPT_LEN // 32)) == (9, 47)


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
