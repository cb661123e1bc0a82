"""What suites have in common: tasks by name, and texts that are long enough."""

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.models import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_CHARACTERS = 16
"""Per token: no prose and no code has so many, so that what is cut off is never missed."""


def chosen(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Returns the tasks that are asked for, in that order, all known ones if none is.

    Raises:
        EvaluationError: If one is unknown.
    """
    names, known = list(names), list(known)
    for name in names:
        if name not in known:
            raise EvaluationError(f"no task {name!r}; there are {', '.join(known)}")
    return names or known


def long_texts(
    tokenizer: "PreTrainedTokenizerBase", texts: Iterable[str], length: int, num_texts: int
) -> list[list[int]]:
    """The beginnings, as token ids, of the first texts that are long enough.

    Raises:
        EvaluationError: If there are not so many.
    """
    encoded = (encode(tokenizer, text[: _MAX_CHARACTERS * length]) for text in texts)
    found = list(islice((ids[:length] for ids in encoded if len(ids) >= length), num_texts))
    if len(found) < num_texts:
        raise EvaluationError(
            f"there are {len(found)} texts of {length} tokens or more: choose fewer examples, or a "
            "smaller length"
        )
    return found
