"""Requests of every kind that vLLM takes, each with eviction settings of its own, served together.

Whatever runs beside it, a request must give what it gives alone. `draw` makes the requests, `serve`
has an engine answer them, `difference` compares two answers of one request.
"""

import json
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any, Self

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.request import request_config
from vllm_kvselect.retention import cuts

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

BLOCK_SIZE = 32
MAX_MODEL_LEN = 448
LORA_ADAPTER = "lora"
"""Key of `Request.sampling` for the number of an adapter; it is no sampling parameter."""

SERVER: dict[str, Any] = {
    "method": "adakv-perturb",
    "budget": 96,
    "window": 20,  # no multiple of the block size, so that their borders are not the same
    "allow_override": ["method", "budget"],
}
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"kv_eviction_budget": 64},
    {"kv_eviction_budget": 0.4},
    {"kv_eviction": "none"},
    {"kv_eviction": "streaming-llm"},
    {"kv_eviction": "snapkv", "kv_eviction_budget": 128},
    {"kv_eviction": "adakv", "kv_eviction_budget": 64},
    {"kv_eviction": "defensivekv"},
)

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
}
SAMPLED: dict[str, dict[str, Any]] = {
    "seeded": {"max_tokens": 10, "temperature": 0.9, "top_p": 0.9, "seed": 11},
    "several samples": {"max_tokens": 6, "temperature": 0.9, "seed": 5, "n": 3},
    "least number of tokens": {"max_tokens": 12, "min_tokens": 6, "stop": [" ", "\n", "e"]},
    "penalties": {"max_tokens": 10, "repetition_penalty": 1.2, "presence_penalty": 0.5},
}
"""Kinds that speculative decoding answers otherwise, or not at all."""
KINDS = GREEDY | SAMPLED


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


@dataclass
class Answer:
    """What a client received, of each sample in the order of their indices.

    Attributes:
        token_ids: Token ids by sample.
        texts: Text by sample.
        logprobs: `[token, log-probability]` pairs by token by sample, where they were asked for.
        prompt_logprobs: The same of the prompt.
        reasons: Finish reason and stop reason by sample; missing until it is finished.
        num_cached_tokens: Prompt tokens from the prefix cache.
    """

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[list[tuple[int, float]]]] = field(default_factory=dict)
    prompt_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    reasons: dict[int, tuple[str | None, Any]] = field(default_factory=dict)
    num_cached_tokens: int = 0

    def add(self, output: "RequestOutput") -> None:
        """Adds a part of the answer, or all of it."""
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens or 0)
        if output.prompt_logprobs:
            self.prompt_logprobs += _pairs(output.prompt_logprobs)
        for sample in output.outputs:
            index = sample.index
            self.token_ids.setdefault(index, []).extend(sample.token_ids)
            self.texts[index] = self.texts.get(index, "") + sample.text
            self.logprobs.setdefault(index, []).extend(_pairs(sample.logprobs or ()))
            if sample.finish_reason is not None:
                self.reasons[index] = (sample.finish_reason, sample.stop_reason)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """An answer that was written as JSON: its keys were numbers, its pairs were tuples."""

        def by_sample(field_name: str) -> dict[int, Any]:
            return {int(index): value for index, value in values[field_name].items()}

        return cls(
            token_ids=by_sample("token_ids"),
            texts=by_sample("texts"),
            logprobs=by_sample("logprobs"),
            prompt_logprobs=values["prompt_logprobs"],
            reasons={index: tuple(reason) for index, reason in by_sample("reasons").items()},
            num_cached_tokens=values["num_cached_tokens"],
        )


@dataclass
class Service:
    """The answers, and what happened on the way to them.

    Attributes:
        answers: One for each request; of those who left, what they had received.
        seen: Counts of steps, preemptions and so on.
    """

    answers: list[Answer]
    seen: Counter[str]


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
) -> list[Request]:
    """Draws requests: every kind equally often, prompts at the borders, many with a prefix shared.

    Args:
        text: Token ids of a long text to cut prompts from.
        num_requests: How many.
        num_distinct: How many different ones; the others are the same again.
        seed: Decides everything.
        kinds: Sampling parameters by kind.
        share_leaving: Share of the clients that leave before their answer is complete.
        num_adapters: LoRA adapters to choose from, besides the base model.
    """
    random, lengths, names = Random(seed), border_lengths(), list(kinds)
    starts = [random.randrange(len(text) - MAX_MODEL_LEN) for _ in range(8)]
    distinct = []
    for index in range(num_distinct):
        kind = names[index % len(names)]
        length = random.choice(lengths)
        if kinds[kind]["max_tokens"] is None:
            length = MAX_MODEL_LEN - random.randint(1, 24)
        start = random.choice(starts)
        sampling = {"temperature": 0.0, **kinds[kind], "extra_args": random.choice(SETTINGS)}
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


def serve_alone(
    llm: "LLM", requests: Iterable[Request], adapters: Sequence[str] = ()
) -> dict[str, Answer]:
    """Answers each different request by itself, when the one before it is finished.

    Returns:
        The answers by `Request.key`.
    """
    distinct = {request.key: replace(request, leaves_after=None) for request in requests}
    service = serve(llm, list(distinct.values()), max_unfinished=1, adapters=adapters)
    return dict(zip(distinct, service.answers, strict=True))


def serve(
    llm: "LLM",
    requests: Sequence[Request],
    max_unfinished: int,
    seed: int = 0,
    preempt: float = 0.0,
    stream: bool = False,
    adapters: Sequence[str] = (),
) -> Service:
    """Has an engine answer requests that arrive at random while others run.

    Args:
        llm: The engine.
        requests: In the order in which they arrive.
        max_unfinished: Requests that wait or run at once.
        seed: Decides when requests arrive and when all are preempted.
        preempt: Probability with which, before a step, all running requests are preempted and the
            prefix cache is emptied. Besides, vLLM preempts where the pool is too small.
        stream: Answers come in parts.
        adapters: Folders of LoRA adapters.
    """
    random, engine = Random(seed), llm.llm_engine
    answers = [Answer() for _ in requests]
    waiting, arrived = deque(range(len(requests))), dict[int, int]()
    seen = Counter({"preemptions": -_num_preemptions(llm)})
    while waiting or arrived:
        while waiting and len(arrived) < max_unfinished and (not arrived or random.random() < 0.7):
            index = waiting.popleft()
            _add(llm, index, requests[index], stream, adapters)
            arrived[index] = 0
        if random.random() < preempt:
            seen["resets"] += engine.reset_prefix_cache(reset_running_requests=True)
        for output in engine.step():
            index = int(output.request_id)
            answers[index].add(output)
            if output.finished:
                del arrived[index]
        seen["steps"] += 1
        for index in list(arrived):
            arrived[index] += 1
            if arrived[index] == requests[index].leaves_after:
                engine.abort_request([str(index)])
                del arrived[index]
                seen["left"] += 1
    seen["preemptions"] += _num_preemptions(llm)
    seen["cached tokens"] = sum(answer.num_cached_tokens for answer in answers)
    seen["tokens"] = sum(len(ids) for answer in answers for ids in answer.token_ids.values())
    return Service(answers, seen)


def difference(request: Request, expected: Answer, answer: Answer) -> str | None:
    """Says how an answer differs from the one given alone; None if it does not.

    Whoever left must have received the beginning of it. Log-probabilities may differ by the
    rounding of float32, whose sums depend on the shape of the batch.
    """
    if len(expected.reasons) != request.sampling.get("n", 1):
        return f"alone, {len(expected.reasons)} samples are finished"
    if any(reason not in ("stop", "length") for reason, _ in expected.reasons.values()):
        return f"alone, it ends with {expected.reasons}"
    for index, ids in expected.token_ids.items():
        received = answer.token_ids.get(index, [])
        if request.leaves_after is not None and index not in answer.reasons:
            ids = ids[: len(received)]
        if received != ids:
            return f"sample {index}: {received} instead of {ids}"
        if not _close(answer.logprobs.get(index, []), expected.logprobs[index][: len(ids)]):
            return f"log-probabilities of sample {index}"
        if index in answer.reasons and (
            answer.reasons[index] != expected.reasons[index]
            or answer.texts[index] != expected.texts[index]
        ):
            return f"sample {index}: {answer.texts[index]!r} {answer.reasons[index]}"
        if index not in answer.reasons and request.leaves_after is None:
            return f"sample {index} is not finished"
    if answer.prompt_logprobs and not _close(answer.prompt_logprobs, expected.prompt_logprobs):
        return "log-probabilities of the prompt"
    if expected.prompt_logprobs and not answer.prompt_logprobs and answer.token_ids:
        return "no log-probabilities of the prompt"
    return None


def _add(llm: "LLM", index: int, request: Request, stream: bool, adapters: Sequence[str]) -> None:
    from vllm.lora.request import LoRARequest

    adapter = request.sampling.get(LORA_ADAPTER, 0)
    llm.llm_engine.add_request(
        str(index),
        {"prompt_token_ids": list(request.prompt)},
        _sampling_params(request.sampling, stream),
        lora_request=LoRARequest(str(adapter), adapter, adapters[adapter - 1]) if adapter else None,
    )


def _sampling_params(sampling: Mapping[str, Any], stream: bool) -> "SamplingParams":
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    arguments = {name: value for name, value in sampling.items() if name != LORA_ADAPTER}
    if (structure := arguments.pop("structured_outputs", None)) is not None:
        arguments["structured_outputs"] = StructuredOutputsParams(**structure)
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**arguments, output_kind=kind)


def _num_preemptions(llm: "LLM") -> int:
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


def _pairs(positions: Iterable[Any]) -> list[list[tuple[int, float]]]:
    return [
        sorted((token, entry.logprob) for token, entry in (position or {}).items())
        for position in positions
    ]


def _close(found: list[Any], expected: list[Any]) -> bool:
    if [[token for token, _ in at] for at in found] != [[t for t, _ in at] for at in expected]:
        return False
    return all(
        abs(a - b) < 1e-3
        for at, wanted in zip(found, expected, strict=True)
        for (_, a), (_, b) in zip(at, wanted, strict=True)
    )
