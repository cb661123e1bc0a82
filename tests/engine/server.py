"""A server as a user starts it, and what tests ask of it over HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.marks import starts_engine
from vllm_kvselect.machine import dtype_name, fast_dtype
from vllm_kvselect.tiny_model import tiny_model

T = TypeVar("T")
NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 300, 32, 8192
DTYPE = dtype_name(fast_dtype())
NUM_KV_HEADS, HEAD_SIZE, NUM_LAYERS = 3, 64, 30
ENTRIES_PER_BLOCK = BLOCK_SIZE * NUM_KV_HEADS * NUM_LAYERS
BLOCK_BYTES = ENTRIES_PER_BLOCK * 2 * HEAD_SIZE * fast_dtype().itemsize


@starts_engine
@contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """Runs `vllm serve` on the small model and yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", folder / "log"
    vllm = Path(sys.executable).with_name("vllm")
    command = [vllm, "serve", tiny_model(), "--served-model-name", "small", "--enforce-eager"]
    command += ["--dtype", DTYPE]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--kv-cache-memory-bytes", str(NUM_BLOCKS * BLOCK_BYTES), *options]
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


def post(url: str, path: str = "/v1/completions", *, engine: int | None = None, **body: Any) -> Any:
    """The response to a request for the small model, greedy unless said otherwise.

    Args:
        url: Of the server.
        path: Of the endpoint.
        engine: Which of several data-parallel engines answers; None: who has the least to do.
        body: Of the request.
    """
    data = json.dumps({"model": "small", "temperature": 0, **body}).encode()
    headers = {"Content-Type": "application/json"}
    if engine is not None:
        headers["X-data-parallel-rank"] = str(engine)
    request = urllib.request.Request(url + path, data, headers)
    return urllib.request.urlopen(request, timeout=120)


@contextmanager
def answering(url: str, prompt: list[int]) -> Iterator[None]:
    """A request that answers until the block ends, when the server sees it hang up."""
    max_tokens = MAX_MODEL_LEN - len(prompt)
    with post(url, prompt=prompt, max_tokens=max_tokens, ignore_eos=True, stream=True) as stream:
        stream.readline()  # the first token
        yield


def refusal(url: str, path: str = "/v1/completions", **body: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(url, path, **body)
    return caught.value.code, json.load(caught.value)["error"]


def metrics(url: str) -> dict[str, float]:
    """Samples of `/metrics` by name, those of one name with labels other than vLLM's apart.

    Those of several engines are added up.
    """
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        text = response.read().decode()
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[" ".join([sample.name, *labels.values()])] += sample.value
    return found


def blocks_held(url: str) -> int:
    """Blocks in use by vLLM's own gauge, a share of all but the null block."""
    return round(metrics(url)["vllm:kv_cache_usage_perc"] * (NUM_BLOCKS - 1))


def readings(read: Callable[[], T], is_last: Callable[[T], bool]) -> list[T]:
    """What was read, again and again, up to the last, which is waited for."""
    found = [read()]
    deadline = time.monotonic() + 120
    while not is_last(found[-1]):
        assert time.monotonic() < deadline, found
        found.append(read())
    return found
