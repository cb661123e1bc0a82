"""How right an answer is: the official metrics of RULER and LongBench, by name.

They give the official scripts' numbers, flaws included, because published numbers have them too:

* `rouge_l` counts every word once. It differs from the official script where that gives up on
  sentences of a thousand words: see `rouge_l.py`.
* `classification` strikes found labels that are part of the right one, but not two in a row.
* `edit_similarity` is rounded to whole per cent. fuzzywuzzy, which LongBench calls, gives two
  different numbers: this one with python-Levenshtein installed, and difflib's without. Nobody
  knows which the published ones are (THUDM/LongBench issue 96).
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping

from rapidfuzz.distance import Indel, Prefix

from vllm_kvselect.evaluation.rouge_l import rouge_l

Metric = Callable[[str, tuple[str, ...], tuple[str, ...]], float]
"""`(prediction, references, classes) -> score`, from 0 to 1."""

NEVER_FALL = ("string_match_all", "string_match_part", "exact")
"""Metrics that more text cannot lower: an answer that is right already need not go on."""

LIKE_FULL = "like_full"
"""Metric of examples without references: their answers are compared by `agreement`."""

ENDED = "ended"
"""Metric of examples that ask for no right answer: whether the model ends it itself."""

READ_ALONG = "read_along"
"""Metric of examples whose answer is given, by `target` or by the full cache: the share of its
tokens that are the likeliest."""

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"\d+")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_CODE = ("`", "#", "//")
"""A line with one of these is a comment, or belongs to Markdown around the code."""


def agreement(prediction: str, full: str) -> dict[str, float]:
    """Compares an answer with the one that the full cache gives, word by word.

    Returns:
        `rouge_l`, the F measure of their longest common subsequence: unlike the metric of this
        name, repeated words count, so that an answer that goes round in circles is seen.
        `leading`, the share of the full cache's answer before the first word that differs.
        `length`, the answer's length over the full cache's. All are 1 for two empty answers.
    """
    words, full_words = prediction.split(), full.split()
    if not words and not full_words:
        return {"rouge_l": 1.0, "leading": 1.0, "length": 1.0}
    num_words = max(1, len(full_words))
    return {
        # Twice the common subsequence over both lengths: that is ROUGE-L's F measure.
        "rouge_l": Indel.normalized_similarity(words, full_words),
        "leading": Prefix.similarity(words, full_words) / num_words,
        "length": len(words) / num_words,
    }


def _string_match_all(
    prediction: str, references: tuple[str, ...], classes: tuple[str, ...]
) -> float:
    """RULER's: share of the references that stand in the prediction."""
    return sum(_contains(prediction, each) for each in references) / len(references)


def _contains(prediction: str, reference: str) -> float:
    """RULER's comparison; control characters are line ends, letters small."""
    text = _CONTROL_CHARACTERS.sub("\n", prediction).strip()
    return float(reference.lower() in text.lower())


def _absent(prediction: str, reference: str) -> float:
    """Whether a secret was kept."""
    return 1 - _contains(prediction, reference)


def _begins(prediction: str, reference: str) -> float:
    return float(prediction.strip().startswith(reference))


def _qa_f1(prediction: str, reference: str) -> float:
    """F measure of words without case, punctuation and articles, in any order."""
    words, right_words = _bare_words(prediction), _bare_words(reference)
    num_common = sum((Counter(words) & Counter(right_words)).values())
    if not num_common:
        return 0.0
    precision, recall = num_common / len(words), num_common / len(right_words)
    return 2 * precision * recall / (precision + recall)


def _bare_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _classification(
    prediction: str, references: tuple[str, ...], classes: tuple[str, ...]
) -> float:
    """One over the labels that are found, if the right one is among them."""
    found = [label for label in classes if label in prediction]
    return max((_share_of_labels(found, each) for each in references), default=0.0)


def _share_of_labels(found: list[str], reference: str) -> float:
    counted = []
    struck = False
    for label in found:
        # The official script strikes labels from the list it walks along, and so passes over the
        # one that follows.
        struck = not struck and label != reference and label in reference
        if not struck:
            counted.append(label)
    return 1 / len(counted) if reference in counted else 0.0


def _count(prediction: str, reference: str) -> float:
    """Share of the right number among all numbers of the prediction."""
    numbers = _NUMBER.findall(prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def _retrieval(prediction: str, reference: str) -> float:
    """The same for a number that the reference gives as `Paragraph 7`."""
    return _count(prediction, reference.removeprefix("Paragraph "))


def _edit_similarity(prediction: str, reference: str) -> float:
    """Compares the first line that may be code; insertions and deletions are edits."""
    lines = prediction.lstrip("\n").split("\n")
    code = (line for line in lines if not any(mark in line for mark in _NO_CODE))
    return round(100 * Indel.normalized_similarity(next(code, ""), reference)) / 100


def _best_of(score: Callable[[str, str], float]) -> Metric:
    """The best score over all references."""

    def best(prediction: str, references: tuple[str, ...], classes: tuple[str, ...]) -> float:
        return max((score(prediction, each) for each in references), default=0.0)

    return best


def _first_line(metric: Metric) -> Metric:
    """A metric that reads only the first line which is not empty."""

    def first(prediction: str, references: tuple[str, ...], classes: tuple[str, ...]) -> float:
        return metric(prediction.lstrip("\n").partition("\n")[0], references, classes)

    return first


METRICS: Mapping[str, Metric] = {
    "string_match_all": _string_match_all,
    "string_match_part": _best_of(_contains),
    "exact": _best_of(_begins),
    "absent": _best_of(_absent),
    "qa_f1": _best_of(_qa_f1),
    "qa_f1_first_line": _first_line(_best_of(_qa_f1)),
    "rouge_l": _best_of(rouge_l),
    "rouge_l_first_line": _first_line(_best_of(rouge_l)),
    "classification": _classification,
    "classification_first_line": _first_line(_classification),
    "count": _best_of(_count),
    "retrieval": _best_of(_retrieval),
    "edit_similarity": _best_of(_edit_similarity),
}
"""Metrics by name."""
