"""The main path over HTTP: `vllm serve --kv-eviction`, as a user starts it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.retention import plan
from vllm_kvselect.tiny_model import tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("server")]  # one server for all
NUM_BLOCKS, PROMPT_LEN, NUM_OUTPUT = 100, 1500, 120


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("server") / "log"
    vllm = Path(sys.executable).with_name("vllm")
    command = [vllm, "serve", tiny_model(), "--served-model-name", "small", "--enforce-eager"]
    command += ["--kv-eviction", "adakv-perturb", "--kv-eviction-budget", "256"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
    command += ["--kv-cache-memory-bytes", str(NUM_BLOCKS * 32 * 23040)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until_healthy(url, process, log)
        yield url
    finally:
        # The whole group: a server stopped while it starts leaves its engine behind.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_healthy(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(0.5)
    pytest.fail(log.read_text()[-3000:])


def post(url: str, **body: Any) -> Any:
    data = json.dumps({"model": "small", "temperature": 0, **body}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", data, headers)
    return urllib.request.urlopen(request, timeout=120)


def blocks_held(url: str) -> int:
    """Blocks in use by vLLM's own gauge, a share of all but the null block."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        (line,) = [
            line
            for line in response.read().decode().splitlines()
            if line.startswith("vllm:kv_cache_usage_perc{")
        ]
    return round(float(line.split()[-1]) * (NUM_BLOCKS - 1))


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
    with pytest.raises(urllib.error.HTTPError) as error:
        post(server, prompt=text_tokens[:3000], max_tokens=8)
    assert error.value.code == 400
    assert "2048" in error.value.read().decode()
    with post(server, prompt=text_tokens[:1000], max_tokens=8) as response:
        answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == 8


def test_help_has_a_group_of_its_own() -> None:
    vllm = Path(sys.executable).with_name("vllm")
    command = [vllm, "serve", "--help=KVEviction"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    for option in ("--kv-eviction ", "-budget", "-window", "-alpha", "-config"):
        assert option in result.stdout
