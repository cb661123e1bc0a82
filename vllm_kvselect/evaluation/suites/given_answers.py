"""Given answers: a known answer is read along token by token, and nothing is generated."""

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.metrics import READ_ALONG
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.evaluation.suites.tasks import chosen
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.tasks import KINDS, cases_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LENGTH = 1000
"""Tokens of a prompt, unless others are asked for. The answer comes on top."""


def given_answers(config: EvaluationConfig, tokenizer: "PreTrainedTokenizerBase") -> list[Example]:
    """Asks one question about each text, `num_examples` per task and length.

    `tasks` are of `KINDS`, or `data` is a folder of texts, of which passages have to be repeated.

    Raises:
        EvaluationError: If a task is unknown, or texts and lengths do not fit.
    """
    if config.data and config.tasks:
        raise EvaluationError("--data is a task of its own, to repeat passages: leave out --tasks")
    kinds = [config.data] if config.data else chosen(config.tasks, KINDS)
    return [
        Example(
            name=f"{Path(kind).name}/{length}/{index}",
            task=Path(kind).name,
            length=length,
            context=tuple(case.context),
            question=tuple(case.question),
            references=(),
            metric=READ_ALONG,
            max_tokens=len(case.answer),
            target=tuple(case.answer),
            depth=case.depth,
        )
        for kind in kinds
        for length in config.lengths or (LENGTH,)
        for index, case in enumerate(
            cases_of(tokenizer, kind, config.num_examples, length, config.seed)
        )
    ]
