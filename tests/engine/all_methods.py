"""A tiny model: requests of all methods in one engine, the float64 model's word on each of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.engine.conftest import Answer, EngineFactory, preempting_all
from tests.engine.float64 import BUDGET
from tests.engine.float64_model import Answer as ExpectedAnswer
from tests.engine.float64_model import Model
from tests.engine.random_models import random_prompts
from tests.engine.recorder import Recorder, recording
from tests.method_cases import MethodCase

EVICTION = {"budget": BUDGET, "allow_override": ["method", "budget"]}
METHODS = (
    "adakv-perturb",
    "snapkv",
    "knorm",
    "random",
    "defensivekv",
    "pyramidkv",
    "ada-pyramidkv-perturb",
    "keydiff",
    "layer-keydiff",
    "layer-probe",
    "ada-probe",
)
CASES = [MethodCase(name) for name in METHODS]
PROMPTS = random_prompts([380 + 7 * index for index in range(len(CASES))])


def check_nothing_dropped_is_stock(start: EngineFactory, **settings: Any) -> None:
    """Compares prompts below the budget with an engine without eviction, bit for bit."""
    prompts, answers = random_prompts([40, 150, 333]), []
    for eviction in (None, {"method": "adakv-perturb", "budget": 512}):
        with start(eviction, 40, **settings) as engine:
            answers.append(
                [(o.token_ids, o.logprobs) for o in engine.outputs(prompts, 24, logprobs=1)]
            )
    assert answers[0] == answers[1]


class Served(NamedTuple):
    """Answers of all methods at once, their prompts in chunks, preempted on the way."""

    answers: list[Answer]
    recorder: Recorder


def serve_all_methods(
    start: EngineFactory, cases: Sequence[MethodCase] = CASES, **settings: Any
) -> Served:
    """Serves a prompt with each of the methods."""
    extra_args: Any = [{"kv_eviction": case.method} for case in cases]
    settings = {"max_num_batched_tokens": 384, **settings}
    with (
        start(EVICTION, 40, **settings) as engine,
        recording(engine.worker.model_runner) as recorder,
        preempting_all(4) as preempted,
    ):
        answers = engine.generate(PROMPTS[: len(cases)], 40, extra_args)
        # One that had its first token only was yet to be packed.
        num_packed_again = sum(count > 1 for count in preempted)
        assert engine.worker.kv_eviction_stats()["num_evicted"] == len(cases) + num_packed_again
    return Served(answers, recorder)


def check_method(
    index: int,
    served: Served,
    folder: Path,
    full_attention: list[int],
    cases: Sequence[MethodCase] = CASES,
    model_class: type[Model] = Model,
    is_rough: bool = False,
) -> None:
    """Compares tokens, their probabilities and what every head retains with the float64 model's.

    Args:
        index: Of the method.
        served: What was served.
        folder: The model.
        full_attention: Its layers with full attention, and no others, which drop entries.
        cases: Of which the method is one.
        model_class: The reference.
        is_rough: Whether it was served in bfloat16.
    """
    prompt, answer = PROMPTS[index], served.answers[index]
    oracle = ExpectedAnswer(model_class(folder), prompt, cases[index])
    assert {layer for layer, _ in oracle.expected} == {*full_attention}
    retained = {
        (layer, head): {
            token
            for owner, token in served.recorder.retained[len(prompt), full_attention.index(layer)]
            if owner == head
        }
        for layer, head in oracle.expected
    }
    check = oracle.check_roughly if is_rough else oracle.check
    check(answer.token_ids, answer.logprobs, retained)
