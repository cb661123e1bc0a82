"""Requests drawn from a server's own OpenAPI schema, most of them bad."""

from collections import Counter
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.load.clients import MODEL_NAME

PATHS = ("/v1/completions", "/v1/chat/completions")
LIMITS = {"max_tokens": 8, "max_completion_tokens": 8, "n": 2, "best_of": 2, "min_tokens": 8}
"""What a request that happens to be good may ask for at most."""


def fuzz(url: str, num_requests: int, random_seed: int) -> tuple[Counter[int], list[str]]:
    """Sends requests that the schema allows, and requests that it does not.

    Args:
        url: The server.
        num_requests: How many.
        random_seed: Decides which.

    Returns:
        Requests by status, 0 for those without an answer, and what the server failed on (500).
    """
    statuses: Counter[int] = Counter()
    failures: list[str] = []
    with httpx.Client(base_url=url, timeout=120) as http:
        schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())
        cases = st.one_of(
            schema[path]["POST"].as_strategy(generation_mode=mode)
            for path in PATHS
            for mode in GenerationMode
        )

        @seed(random_seed)
        @settings(
            max_examples=num_requests,
            phases=(Phase.generate,),
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(cases)
        def send(case: Any) -> None:
            body = _bounded(case.body)
            try:
                with http.stream("POST", case.path, json=body) as response:
                    status, text = response.status_code, response.read().decode()
            except (httpx.HTTPError, ValueError, TypeError) as error:
                status, text = 0, repr(error)
            statuses[status] += 1
            if status in (0, 500):
                failures.append(f"{status} {case.path} {str(body)[:300]}: {text[:300]}")

        send()
    return statuses, failures


def _bounded(body: Any) -> Any:
    """The body with our model's name, and not more work than a moment's."""
    if not isinstance(body, dict):
        return body if isinstance(body, str | int | list) else str(body)
    if isinstance(body.get("model"), str):
        body = {**body, "model": MODEL_NAME}
    limits = {name: most for name, most in LIMITS.items() if isinstance(body.get(name), int)}
    return {**body, **{name: min(body[name], most) for name, most in limits.items()}}
