"""What an evaluation asks of a server, answered without an engine: also by one that lies."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.planning.cuts import cuts
from vllm_kvselect.request import RequestError, request_config

BLOCK_SIZE, MAX_MODEL_LEN = 32, 2048


@dataclass
class StandIn:
    """A server's state.

    Attributes:
        eviction: Its configuration; None for stock vLLM.
        drops: Whether it drops what it is asked to.
        url: Its address.
        num_answered: Requests that it answered.
    """

    eviction: EvictionConfig | None = field(
        default_factory=lambda: EvictionConfig(method="none", allow_override=("method", "budget"))
    )
    drops: bool = True
    url: str = ""
    num_answered: int = 0
    num_evicted: int = 0
    num_freed: int = 0
    lock: Lock = field(default_factory=Lock)

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body of the response to a request."""
        num_prompt_tokens, num_tokens = len(body["prompt"]), min(3, body["max_tokens"])
        try:
            asked = request_config(
                self.eviction or EvictionConfig(method="adakv-perturb"), body.get("vllm_xargs")
            )
        except RequestError as error:
            return 400, {"error": {"message": str(error)}}
        with self.lock:
            self.num_answered += 1
            num_freed = cuts(num_prompt_tokens, BLOCK_SIZE, asked).num_freed(num_prompt_tokens)
            if self.eviction and self.drops and num_tokens > 1 and num_freed:
                self.num_evicted += 1
                self.num_freed += num_freed
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens}
        return 200, {"choices": [{"index": 0, "text": " 42"}], "usage": usage}

    @property
    def metrics(self) -> str:
        """The Prometheus text."""
        lines = [
            f'vllm:cache_config_info{{engine="0",num_gpu_blocks="9",block_size="{BLOCK_SIZE}"}} 1',
            f'vllm:request_success_total{{engine="0",model_name="m"}} {self.num_answered}',
        ]
        if self.eviction:
            lines += [
                f'vllm:kv_eviction_requests_total{{engine="0"}} {self.num_evicted}',
                f'vllm:kv_eviction_freed_blocks_total{{engine="0"}} {self.num_freed}',
            ]
        return "\n".join(lines) + "\n"


@contextmanager
def standing_in(server: StandIn) -> Iterator[StandIn]:
    """Serves until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._send(200, server.metrics.encode())
            else:
                models = {"data": [{"id": "m", "max_model_len": MAX_MODEL_LEN}]}
                self._send(200, json.dumps(models).encode())

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            status, body = server.answer(json.loads(self.rfile.read(length)))
            self._send(status, json.dumps(body).encode())

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_address[1]}"
        Thread(target=http.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server
        finally:
            http.shutdown()
