"""Clients of a server under load: what they ask for, what they expect, and what came of it."""

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from tests.load.mixture import MAX_MODEL_LEN, Request

MODEL_NAME = "soak"
SECONDS = 120.0
"""An answer that takes longer is lost."""

BAD: tuple[tuple[dict[str, Any], int], ...] = (
    ({"vllm_xargs": {"kv_eviction": "snapkw"}}, 400),
    ({"vllm_xargs": {"kv_eviction_budget": 0}}, 400),
    ({"vllm_xargs": {"kv_eviction_budget": "many"}}, 400),
    ({"vllm_xargs": {"kv_eviction_window": 8}}, 400),
    ({"prompt": list(range(100, 100 + MAX_MODEL_LEN))}, 400),
    ({"prompt": []}, 400),
    ({"temperature": -1}, 400),
    ({"max_tokens": 0}, 400),
    ({"n": 0}, 400),
    ({"structured_outputs": {"regex": "("}}, 400),
    ({"model": "another"}, 404),
)
"""Changes to a request, and the status with which it is refused."""


@dataclass
class Outcomes:
    """What came of the requests.

    Attributes:
        counts: Requests by outcome: `answered`, `left`, `refused` for what they ask, `busy` (503).
        wrong: Answers other than those given alone, and statuses other than expected.
        lost: Requests that got no answer at all.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        """All of them."""
        return self.counts.total() + len(self.wrong) + len(self.lost)


Choices = dict[int, tuple[list[int], str | None]]
"""Token ids and finish reason by index."""


def body_of(request: Request) -> dict[str, Any]:
    """A request in the terms of the OpenAI API."""
    sampling = {name: value for name, value in request.sampling.items() if name != "extra_args"}
    xargs = request.sampling["extra_args"]
    settings = {"vllm_xargs": xargs} if xargs else {}
    prompt = list(request.prompt)
    return {"model": MODEL_NAME, "prompt": prompt, "return_token_ids": True, **sampling, **settings}


class Clients:
    """Clients of one server, with the answers that each request must get.

    Args:
        url: The server.
        expected: `(request, choices)`, as the server gave them alone.
        random: Decides what the clients do.
    """

    def __init__(self, url: str, expected: list[tuple[Request, Choices]], random: Random) -> None:
        # A connection each: one kept open may be closed by the server just as it is used again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.http = httpx.AsyncClient(base_url=url, timeout=SECONDS, limits=limits)
        self.expected, self._random = expected, random
        self.outcomes = Outcomes()
        self._num_left_to_send = 0

    async def choices(self, request: Request) -> Choices:
        """What the server answers now, for the requests that are asked alone."""
        response = await self.http.post("/v1/completions", json=body_of(request))
        response.raise_for_status()
        return _choices(response.json())

    async def run(self, num_requests: int, num_clients: int, burst: int, deadline: float) -> None:
        """Sends requests until there are enough or the time is over, then waits for all answers.

        Args:
            num_requests: How many.
            num_clients: Clients that each send one after the other.
            burst: Requests that now and then are sent all at once.
            deadline: When to stop sending, on the clock of the event loop.
        """
        self._num_left_to_send = num_requests

        async def send_one_after_the_other() -> None:
            while self._take(1) and asyncio.get_running_loop().time() < deadline:
                await self._send()
                if self._random.random() < 0.004 and self._take(burst):
                    await asyncio.gather(*(self._ask() for _ in range(burst)))
                if self._random.random() < 0.01:  # preempts everybody
                    await self.http.post("/reset_prefix_cache?reset_running_requests=true")

        await asyncio.gather(*(send_one_after_the_other() for _ in range(num_clients)))

    def _take(self, number: int) -> bool:
        if self._num_left_to_send < number:
            return False
        self._num_left_to_send -= number
        return True

    async def _send(self) -> None:
        action = self._random.choices(
            (self._ask, self._stream, self._leave, self._bad), (5, 2, 2, 1)
        )
        await action[0]()

    async def _ask(self) -> None:
        request, expected = self._random.choice(self.expected)
        with self._noting_losses(request.kind):
            response = await self.http.post("/v1/completions", json=body_of(request))
            if self._is_answered(response.status_code, request.kind):
                self._compare(request.kind, _choices(response.json()), expected)

    async def _stream(self) -> None:
        request, expected = self._streamed()
        with self._noting_losses(request.kind):
            body = body_of(request) | {"stream": True}
            found: Choices = {}
            status = 200
            async with self.http.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        part = json.loads(line.removeprefix("data: "))
                        _extend(found, part)
                        status = part.get("error", {}).get("code", status)
            # A full queue shows only when the stream has begun.
            if self._is_answered(max(status, response.status_code), request.kind):
                self._compare(request.kind, found, expected)

    async def _leave(self) -> None:
        """Closes the connection in mid-prefill, or after some tokens."""
        request, _ = self._streamed()
        seconds, num_lines = self._random.uniform(0.0, 0.6), self._random.randint(1, 8)
        body = body_of(request) | {"stream": True}
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with (
                asyncio.timeout(seconds),
                self.http.stream("POST", "/v1/completions", json=body) as response,
            ):
                async for _ in response.aiter_lines():
                    num_lines -= 1
                    if not num_lines:
                        break
        self.outcomes.counts["left"] += 1

    async def _bad(self) -> None:
        request, _ = self._random.choice(self.expected)
        changes, status = self._random.choice(BAD)
        with self._noting_losses(str(changes)):
            response = await self.http.post("/v1/completions", json=body_of(request) | changes)
            if response.status_code == status:
                self.outcomes.counts["refused"] += 1
            elif response.status_code == 503:
                self.outcomes.counts["busy"] += 1
            else:
                self.outcomes.wrong.append(f"status {response.status_code} for {str(changes)[:80]}")

    def _streamed(self) -> tuple[Request, Choices]:
        """A request that vLLM streams: log-probabilities of the prompt it does not."""
        return self._random.choice(
            [known for known in self.expected if "prompt_logprobs" not in known[0].sampling]
        )

    def _is_answered(self, status: int, kind: str) -> bool:
        if status == 503:
            self.outcomes.counts["busy"] += 1
        elif status != 200:
            self.outcomes.wrong.append(f"status {status} for {kind}")
        return status == 200

    def _compare(self, kind: str, found: Choices, expected: Choices) -> None:
        if found == expected:
            self.outcomes.counts["answered"] += 1
        else:
            self.outcomes.wrong.append(f"{kind}: {found} instead of {expected}")

    @contextlib.contextmanager
    def _noting_losses(self, kind: str) -> Any:
        try:
            yield
        except httpx.HTTPError as error:
            self.outcomes.lost.append(f"{kind}: {error!r}")


def _choices(answer: dict[str, Any]) -> Choices:
    found: Choices = {}
    _extend(found, answer)
    return found


def _extend(found: Choices, part: dict[str, Any]) -> None:
    for choice in part.get("choices", ()):
        ids, _ = found.get(choice["index"], ([], None))
        found[choice["index"]] = ([*ids, *(choice["token_ids"] or ())], choice["finish_reason"])
