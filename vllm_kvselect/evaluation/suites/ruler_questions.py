"""Questions about RULER's texts: the published one, and more where a text answers more."""

import re
from collections import Counter
from dataclasses import dataclass

from vllm_kvselect.evaluation.suites.ruler_generator import Prompt
from vllm_kvselect.evaluation.suites.ruler_package import Task

_NEEDLE = re.compile(r"One of the special magic \w+ for (?P<key>.+?) is: (?P<value>[\w-]+)\.")
_ASKED_FOR = re.compile(r"(?<= for )(?P<key>.+?)(?= mentioned in the provided text)")


@dataclass(frozen=True)
class Question:
    """A question about a text, up to where the answer begins, and right answers, or parts of one.

    Its depth is where in the text the answer stands, 0 is its beginning and 1 its end; None where
    that is not one known place.
    """

    text: str
    references: tuple[str, ...]
    depth: float | None = None


def has_more_questions(task: Task) -> bool:
    """Whether its texts answer more than what is published.

    `niah_multikey_1` leaves out three keys, `niah_multikey_2` and `_3` most of their text.
    `niah_multiquery` asks for all keys at once, the other tasks have one question.
    """
    return task.name.startswith("niah_multikey")


def questions(task: Task, prompt: Prompt, at_most: int) -> tuple[str, list[Question]]:
    """Splits a prompt into its text, from the first character on, and questions about it.

    The published one is the first of `at_most`. Further ones have its words; their needles are
    spread evenly over the text.
    """
    context, published = task.split(prompt.text)
    needles = list(_NEEDLE.finditer(context)) if task.kind == "niah" else []
    places = {needle["value"]: round(needle.start() / len(context), 3) for needle in needles}
    depth = places[prompt.outputs[0]] if needles and len(prompt.outputs) == 1 else None
    asked = [Question(published, prompt.outputs, depth)]
    if has_more_questions(task):
        for needle in _spread(_not_asked_for(published, needles), at_most - 1):
            words = _ASKED_FOR.sub(needle["key"], published)
            asked.append(Question(words, (needle["value"],), places[needle["value"]]))
    return context, asked


def right_answer(task: Task, outputs: tuple[str, ...]) -> str:
    """One right answer, in the form of the solved example where the prompt has one.

    What a generator gives for right are alternatives in question answering, else parts.
    """
    if task.kind == "common_words_extraction":
        return " ".join(f"{number}. {word}" for number, word in enumerate(outputs, start=1))
    if task.kind == "variable_tracking":
        return " " + " ".join(outputs)
    if task.kind == "qa":
        return " " + outputs[0]
    return " " + ", ".join(outputs)


def _not_asked_for(question: str, needles: list[re.Match[str]]) -> list[re.Match[str]]:
    """Needles with one value that the question does not ask for."""
    values = Counter(needle["key"] for needle in needles)
    asked_for = {match["key"] for match in _ASKED_FOR.finditer(question)}
    return [
        needle
        for needle in needles
        if values[needle["key"]] == 1 and needle["key"] not in asked_for
    ]


def _spread(needles: list[re.Match[str]], at_most: int) -> list[re.Match[str]]:
    count = min(at_most, len(needles))
    return [needles[(2 * index + 1) * len(needles) // (2 * count)] for index in range(count)]
