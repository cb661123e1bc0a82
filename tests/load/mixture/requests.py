"""Requests of every kind that vLLM takes, each with eviction settings of its own."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from vllm_kvselect.config import OVERRIDE_NAMES, EvictionConfig
from vllm_kvselect.planning.cuts import cuts
from vllm_kvselect.planning.segments import sparse_segments
from vllm_kvselect.request import request_config

BLOCK_SIZE = 32
MAX_MODEL_LEN = 448
LORA_ADAPTER = "lora"
"""Key of `Request.sampling` for the number of an adapter; it is no sampling parameter."""

SERVER: dict[str, Any] = {
    "method": "adakv-perturb",
    "budget": 96,
    "window": 20,  # no multiple of the block size, so that their borders are not the same
    "decode_interval": 40,
    "prefill_segment": 64,
    "prefill_budget": 64,
    "prefill_dense_until": 64,
    "allow_override": OVERRIDE_NAMES,
}
DENSE: dict[str, Any] = {name: value for name, value in SERVER.items() if "prefill" not in name}
DENSE |= {"allow_override": [name for name in OVERRIDE_NAMES if "prefill" not in name]}
"""A server for models that are not prefilled sparsely."""

WITH_ROUNDS: tuple[dict[str, Any], ...] = (
    {"kv_eviction_decode_budget": 64, "kv_eviction_decode_interval": 33},
    {"kv_eviction_decode_budget": 64, "kv_eviction": "r-kv"},
    {"kv_eviction_decode_budget": 80, "kv_eviction": "thetakv", "kv_eviction_budget": 1.0},
    {
        "kv_eviction_decode_budget": 64,
        "kv_eviction": "ada-probe",
        "kv_eviction_prompt_interval": 80,
    },
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"kv_eviction_budget": 64},
    {"kv_eviction_budget": 0.4},
    {"kv_eviction": "none"},
    {"kv_eviction": "streaming-llm"},
    {"kv_eviction": "snapkv", "kv_eviction_budget": 128},
    {"kv_eviction": "adakv", "kv_eviction_budget": 64},
    {"kv_eviction": "defensivekv"},
    *WITH_ROUNDS,
    {"kv_prefill": "critiprefill"},
    {"kv_prefill": "critiprefill", "kv_prefill_budget": 96, "kv_eviction": "none"},
    {"kv_prefill": "critiprefill", "kv_eviction_context": 300},
    {"kv_eviction_prompt_interval": 64, "kv_eviction_budget": 64},
    {"kv_eviction_prompt_interval": 50, "kv_eviction": "layer-keydiff"},
    {"kv_eviction_prompt_interval": 60, "kv_eviction_context": 300},
    {"kv_eviction_context": 200},
    {"kv_eviction_context": 250, "kv_eviction": "layer-keydiff"},
    {"kv_eviction_context": 256, "kv_eviction": "keydiff"},
    {"kv_eviction_context": 300, "kv_eviction": "layer-defensivekv", "kv_eviction_budget": 0.5},
)

LONG = "long answer"
"""The kind that is always asked for with a decode budget."""

GREEDY: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 12, "ignore_eos": True},
    "one token": {"max_tokens": 1},
    "log-probabilities": {"max_tokens": 8, "logprobs": 3},
    "log-probabilities of the prompt": {"max_tokens": 4, "prompt_logprobs": 1},
    "stop string": {"max_tokens": 16, "stop": ["e", "\n"], "include_stop_str_in_output": True},
    "JSON": {
        "max_tokens": 20,
        "structured_outputs": {
            "json": {
                "type": "object",
                "properties": {"year": {"type": "integer"}, "known": {"type": "boolean"}},
                "required": ["year", "known"],
            }
        },
    },
    "regular expression": {"max_tokens": 12, "structured_outputs": {"regex": "[A-Z]{3}-[0-9]{5}"}},
    "until the context is full": {"max_tokens": None, "ignore_eos": True},
    LONG: {"max_tokens": 110, "ignore_eos": True},
}
SAMPLED: dict[str, dict[str, Any]] = {
    "seeded": {"max_tokens": 10, "temperature": 0.9, "top_p": 0.9, "seed": 11},
    "several samples": {"max_tokens": 6, "temperature": 0.9, "seed": 5, "n": 3},
    "least number of tokens": {"max_tokens": 12, "min_tokens": 6, "stop": [" ", "\n", "e"]},
    "penalties": {"max_tokens": 10, "repetition_penalty": 1.2, "presence_penalty": 0.5},
}
"""Kinds that speculative decoding answers otherwise, or not at all."""
KINDS = GREEDY | SAMPLED
WITHOUT_TOKENIZER = {
    name: sampling
    for name, sampling in KINDS.items()
    if sampling.keys().isdisjoint(("stop", "structured_outputs"))
}


@dataclass(frozen=True)
class Request:
    """What a client asks for.

    Attributes:
        kind: A key of `KINDS`, for people.
        prompt: Token ids.
        sampling: Arguments of `SamplingParams`, as plain values, and perhaps a `LORA_ADAPTER`.
        leaves_after: Steps after which the client leaves, or None.
    """

    kind: str
    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    leaves_after: int | None = None

    @property
    def key(self) -> str:
        """Equal for requests with equal answers."""
        return json.dumps([self.prompt, self.sampling], sort_keys=True)


def border_lengths() -> list[int]:
    """Prompt lengths at and next to every border of every setting.

    Borders are multiples of the block size, the window, the budget's first prompt that drops
    something, and all at which the tail begins one block later.
    """
    server = EvictionConfig.parse(SERVER)
    borders = {server.window, *range(BLOCK_SIZE, MAX_MODEL_LEN, BLOCK_SIZE)}
    for settings in SETTINGS:
        config = request_config(server, settings)
        plans = [
            [(cut.first_packed, cut.tail_start) for cut in cuts(length, BLOCK_SIZE, config)]
            for length in range(MAX_MODEL_LEN)
        ]
        sparse = [
            sparse_segments(length, cuts(length, BLOCK_SIZE, config), config)
            for length in range(MAX_MODEL_LEN)
        ]
        plans = [*zip(plans, sparse, strict=True)]
        borders |= {n for n in range(1, MAX_MODEL_LEN) if plans[n] != plans[n - 1]}
    beside = {border + distance for border in borders for distance in (-1, 0, 1)}
    return sorted(length for length in beside if 0 < length < MAX_MODEL_LEN - 24)


def draw(
    text: Sequence[int],
    num_requests: int,
    num_distinct: int,
    seed: int,
    kinds: Mapping[str, dict[str, Any]] = KINDS,
    share_leaving: float = 0.08,
    num_adapters: int = 0,
    settings: Sequence[dict[str, Any]] = SETTINGS,
) -> list[Request]:
    """Draws requests: every kind equally often, prompts at the borders, many with a prefix shared.

    Contexts are of two texts only, so that several requests read the same one. Long answers all
    have a decode budget.

    Args:
        text: Token ids of a long text to cut prompts from.
        num_requests: How many.
        num_distinct: How many different ones; the others are the same again.
        seed: Decides everything.
        kinds: Sampling parameters by kind.
        share_leaving: Share of the clients that leave before their answer is complete.
        num_adapters: LoRA adapters to choose from, besides the base model.
        settings: Of requests other than long answers.
    """
    random, lengths, names = Random(seed), border_lengths(), list(kinds)
    starts = [random.randrange(len(text) - MAX_MODEL_LEN) for _ in range(8)]
    distinct = []
    for index in range(num_distinct):
        kind = names[index % len(names)]
        length = random.choice(lengths)
        if kinds[kind]["max_tokens"] is None:
            length = MAX_MODEL_LEN - random.randint(1, 24)
        own = random.choice(WITH_ROUNDS if kind == LONG else settings)
        start = random.choice(starts[:2] if "kv_eviction_context" in own else starts)
        sampling = {"temperature": 0.0, **kinds[kind], "extra_args": own}
        if num_adapters:
            sampling[LORA_ADAPTER] = random.randint(0, num_adapters)
        distinct.append(Request(kind, tuple(text[start : start + length]), sampling))
    again = random.choices(distinct, k=num_requests - num_distinct)
    requests = [*distinct, *again]
    random.shuffle(requests)
    return [
        replace(request, leaves_after=random.randint(1, 8))
        if random.random() < share_leaving
        else request
        for request in requests
    ]
