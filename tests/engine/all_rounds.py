"""All methods at once in an engine that drops entries again and again, and float64's word on it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.engine.conftest import Answer, EngineFactory, preempting_all
from tests.engine.float64_model import Model
from tests.engine.float64_rounds import Answered, RoundsOf, recording_rounds
from tests.engine.recorder import Recorder, recording
from tests.method_cases import MethodCase
from vllm_kvselect.registry import METHODS

DECODE_BUDGET, INTERVAL = 96, 64
ROUNDS = {"decode_budget": DECODE_BUDGET, "decode_interval": INTERVAL, "check_integrity": True}
CASES = [MethodCase(name) for name, method in METHODS.items() if method.in_rounds]


class Served(NamedTuple):
    """Answers of all methods at once, preempted on the way."""

    prompts: Sequence[list[int]]
    answers: list[Answer]
    recorder: Recorder
    rounds: RoundsOf
    keep_first: int | None = None

    def check(self, index: int, folder: Path) -> None:
        """Every cut and every token of a request is as the float64 model says.

        Args:
            index: The prompt's place, and its method's.
            folder: The model.
        """
        prompt = self.prompts[index]
        at_prompt = {
            layer: retained
            for (length, layer), retained in self.recorder.retained.items()
            if length == len(prompt)
        }
        rounds = [made for _, made in sorted(self.rounds[len(prompt)].items())]
        assert rounds
        answered = Answered(Model(folder), prompt, self.answers[index], at_prompt, rounds)
        answered.check_tokens()
        case = MethodCase(CASES[index].method, {"keep_first": self.keep_first})
        answered.check_rounds(case)
        answered.check_first(case.config().num_first)


def serve(
    start: EngineFactory,
    prompts: Sequence[list[int]],
    num_generated: int,
    max_num_batched_tokens: int = 256,
    num_answering: int = 6,
    **values: Any,
) -> Served:
    """Serves a prompt for each method, in a pool so small that all are preempted.

    Args:
        start: Starts an engine.
        prompts: The prompts, of different lengths.
        num_generated: Tokens of each answer.
        max_num_batched_tokens: Most tokens of a step.
        num_answering: All are preempted once so many have generated half of their answers.
        **values: What the configuration has on top.
    """
    extra_args: Any = [{"kv_eviction": case.method} for case in CASES]
    settings = {"budget": 160, "allow_override": ["method"], **values}
    with (
        start(settings, 90, max_num_batched_tokens=max_num_batched_tokens) as engine,
        recording(engine.worker.model_runner) as recorder,
        recording_rounds() as rounds,
        preempting_all(num_answering, num_tokens=num_generated // 2) as preempted,
    ):
        answers = engine.generate(prompts, num_generated, extra_args)
    assert preempted
    return Served(prompts, answers, recorder, rounds, values.get("keep_first"))
