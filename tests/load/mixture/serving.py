"""An engine answers requests that arrive while others run."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

from tests.load.mixture.answers import Answer
from tests.load.mixture.requests import LORA_ADAPTER, Request

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams


@dataclass
class Service:
    """The answers, and what happened on the way to them.

    Attributes:
        answers: One for each request; of those who left, what they had received.
        seen: Counts of steps, preemptions and so on.
    """

    answers: list[Answer]
    seen: Counter[str]


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
