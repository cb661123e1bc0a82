"""Long answers about real texts, to be compared with the full cache's own."""

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.metrics import LIKE_FULL
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.evaluation.suites.tasks import chosen, long_texts
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.models import chat, encode
from vllm_kvselect.offline.texts import read_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LENGTH = 1500
"""Tokens of a prompt and its answer, unless others are asked for."""
MAX_TOKENS = 256
"""Tokens of an answer, unless others are asked for."""

_MIN_TEXT = 64
"""A text of fewer tokens is nothing to write about."""
_MARK = "(text and instruction)"


class Instruction(NamedTuple):
    """What is asked for: the texts, as in `read_texts`, and what to do with the one above."""

    source: str
    instruction: str


INSTRUCTIONS = {
    "summary": Instruction("sotu", "Write a detailed summary of the speech above."),
    "continuation": Instruction("sotu", "Continue the speech above from where it breaks off."),
    "explanation": Instruction("stdlib", "Explain in detail what the Python code above does."),
}
"""Tasks by name. The code is this Python's own: another version's may differ."""


def long_answers(config: EvaluationConfig, tokenizer: "PreTrainedTokenizerBase") -> list[Example]:
    """Makes prompts with the beginning of a text and, after it, an instruction.

    The question is all that follows the text: the instruction, and the chat template's rest up to
    where the answer begins. `tasks` are of `INSTRUCTIONS`, and `lengths` are tokens of prompt and
    answer together. There are no references.

    Raises:
        EvaluationError: If a task is unknown, a length leaves no room for a text, there are too
            few texts of that length, or the model has no chat template.
    """
    return [
        example
        for name in chosen(config.tasks, INSTRUCTIONS)
        for length in config.lengths or (LENGTH,)
        for example in _examples(config, tokenizer, name, length)
    ]


def _examples(
    config: EvaluationConfig, tokenizer: "PreTrainedTokenizerBase", name: str, length: int
) -> Iterator[Example]:
    """The examples of one task and length."""
    asked = INSTRUCTIONS[name]
    max_tokens = config.max_tokens or MAX_TOKENS
    before, _, after = chat(tokenizer, _MARK).partition(_MARK)
    head, question = (
        encode(tokenizer, part) for part in (before, f"\n\n{asked.instruction}{after}")
    )
    room = length - max_tokens - len(head) - len(question)
    if room < _MIN_TEXT:
        raise EvaluationError(
            f"{length} tokens with {max_tokens} for the answer have no room for a text: choose a "
            "larger length, or fewer --max-tokens"
        )
    texts = read_texts(asked.source)
    random.Random(f"{config.seed} {name}").shuffle(texts)  # other texts for every task
    for index, text in enumerate(long_texts(tokenizer, texts, room, config.num_examples)):
        yield Example(
            name=f"{name}/{length}/{index}",
            task=name,
            length=length,
            context=(*head, *text),
            question=tuple(question),
            references=(),
            metric=LIKE_FULL,
            max_tokens=max_tokens,
        )
