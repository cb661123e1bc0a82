"""The served engine of an evaluation: the running one that `--url` names, or one started for it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml
from rich.console import Console

from vllm_kvselect.config import OVERRIDE_NAMES, EvictionConfig, Prefill
from vllm_kvselect.evaluation.cut_check import CutCheck
from vllm_kvselect.evaluation.server import serving
from vllm_kvselect.evaluation.settings import FULL, EvaluationConfig
from vllm_kvselect.machine import default_dtype
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.models import model_folder
from vllm_kvselect.request import REQUEST_KEYS

PROMPTS_AT_ONCE = 4
"""Prompts that are in flight: enough to batch, few enough that their blocks stay in the pool."""

GIVEN_ANSWERS = "vllm_kvselect.engine.given_answers:GivenAnswers"
"""vLLM's plugin by which a server generates the answer that a request gives as `ANSWER_KEY`."""
ANSWER_KEY = "answer_token_ids"

_TIMEOUT = httpx.Timeout(None, connect=30.0)
"""A long prompt may take minutes, and longer when it waits for its blocks."""


@dataclass(frozen=True)
class Needs:
    """What a server must be able to do.

    Attributes:
        max_model_len: Tokens of the longest prompt with its answer.
        num_tokens: Tokens of all that are there at once.
        reads_along: Whether it is given answers.
    """

    max_model_len: int
    num_tokens: int
    reads_along: bool


@dataclass(frozen=True)
class Endpoint:
    """A server that lets requests choose method and budget."""

    url: str
    model: str
    max_model_len: int
    cuts: CutCheck

    def client(self) -> httpx.AsyncClient:
        """A client for requests at the same time."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=self.url, timeout=_TIMEOUT, limits=limits)


def full_cache(config: EvaluationConfig) -> EvictionConfig:
    """The settings of the full cache, prefilled densely, beside `config.evictions()`."""
    return EvictionConfig.parse({**config.eviction, "method": FULL, "prefill": "dense"})


def request_settings(eviction: EvictionConfig) -> dict[str, Any]:
    """What a request sends as `vllm_xargs`: whatever would act, also where it is the default."""
    without_eviction = ("kv_eviction", "kv_prefill", "kv_prefill_budget")
    keys = REQUEST_KEYS if eviction.enabled else without_eviction
    values = {key: getattr(eviction, REQUEST_KEYS[key]) for key in keys}
    if not eviction.decode_budget:
        values.pop("kv_eviction_decode_interval", None)
    if eviction.of(Prefill).prefill == "dense":
        values.pop("kv_prefill_budget", None)
    return {key: value for key, value in values.items() if value is not None}


def reason_of(response: httpx.Response) -> str:
    """Why a server refuses a request, in its own words."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}"


@contextmanager
def endpoint(config: EvaluationConfig, needs: Needs) -> Iterator[Endpoint]:
    """Gives a server on which every method and budget may be asked for.

    Raises:
        EvaluationError: If it cannot be started, is too small, or refuses a method or a budget.
    """
    if config.url:
        _refuse_unseen(config)
        yield _checked(config, config.url.rstrip("/").removesuffix("/v1"), needs)
        return
    model = model_folder(config.model)
    config.out.mkdir(parents=True, exist_ok=True)
    flags, log = _flags(config, model, needs), config.out / "server.log"
    console = Console(stderr=True)
    with serving(console, Path(model).name, model, flags, dict(os.environ), log) as server:
        yield _checked(config, server.url, needs)


def _refuse_unseen(config: EvaluationConfig) -> None:
    """Refuses what belongs to a running server and cannot be checked from outside.

    Not so the window, which decides what cuts are due: a wrong one frees other blocks, unless both
    round to the same.
    """
    if unseen := sorted(config.eviction.keys() - {"window"}):
        raise EvaluationError(
            f"{', '.join(unseen)} belong to the server, and {config.url} does not say what it has; "
            "start it with them and leave them out here, or leave --url out"
        )


def _flags(config: EvaluationConfig, model: str, needs: Needs) -> list[str]:
    """Arguments of `vllm serve`; the settings of eviction go into a file."""
    settings = config.out / "server.yaml"
    values = {"method": FULL, "budget": 1.0, "allow_override": list(OVERRIDE_NAMES)}
    settings.write_text(yaml.safe_dump({**config.eviction, **values}), encoding="utf-8")
    on_cuda = torch.cuda.is_available()
    dtype = config.dtype or default_dtype()
    flags = ["--kv-eviction-config", str(settings), "--dtype", dtype, "--enforce-eager"]
    flags += ["--kv-cache-dtype", config.kv_cache_dtype]
    flags += ["--max-model-len", str(needs.max_model_len), "--disable-uvicorn-access-log"]
    # Greedy means greedy: models come with penalties of their own, which would hold otherwise.
    flags += ["--generation-config", "vllm"]
    if needs.reads_along:
        flags += ["--logits-processors", GIVEN_ANSWERS]
    if not on_cuda:  # there vLLM takes what is free
        size = 2 if dtype in ("bfloat16", "float16") else 4
        size = 1 if config.kv_cache_dtype.startswith("fp8") else size
        num_bytes = needs.num_tokens * _entry_values(model) * size
        flags += ["--kv-cache-memory-bytes", str(num_bytes)]
    return flags


def _entry_values(model: str) -> int:
    """Numbers that one token has in the cache, in all layers."""
    from transformers import AutoConfig

    shape = AutoConfig.from_pretrained(model).get_text_config()
    num_heads = shape.num_attention_heads
    num_kv_heads = getattr(shape, "num_key_value_heads", None) or num_heads
    head_size = getattr(shape, "head_dim", None) or shape.hidden_size // num_heads
    return int(2 * shape.num_hidden_layers * num_kv_heads * head_size)


def _checked(config: EvaluationConfig, url: str, needs: Needs) -> Endpoint:
    """A server that was asked whether it does what is needed."""
    cuts = CutCheck(url)
    with httpx.Client(base_url=url, timeout=_TIMEOUT) as http:
        model = http.get("/v1/models").json()["data"][0]
        if model["max_model_len"] < needs.max_model_len:
            raise EvaluationError(
                f"{url} takes {model['max_model_len']} tokens, prompt and answer together, and the "
                f"longest here has {needs.max_model_len}; start it with a longer --max-model-len, "
                "or ask for shorter --lengths"
            )
        found = Endpoint(url, model["id"], model["max_model_len"], cuts)
        _ask_for_all(http, found, [full_cache(config), *config.evictions()])
    return found


def _ask_for_all(http: httpx.Client, found: Endpoint, evictions: Sequence[EvictionConfig]) -> None:
    """Asks for every method and budget once, so that a refusal comes before any work."""
    for eviction in evictions:
        settings = request_settings(eviction)
        body = {"model": found.model, "prompt": [0], "max_tokens": 1, "vllm_xargs": settings}
        response = http.post("/v1/completions", json=body)
        if response.is_error:
            raise EvaluationError(f"{found.url} refuses {settings}: {reason_of(response)}")
        found.cuts.note(1, 1, eviction)
