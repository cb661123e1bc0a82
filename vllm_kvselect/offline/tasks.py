"""Questions about long texts whose answers are known token by token."""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.models import encode
from vllm_kvselect.offline.texts import read_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Scenario = Literal["regular", "context-only"]
"""Whether the compressed prompt holds the question (regular) or the text alone (context-only)."""
SCENARIOS: tuple[Scenario, ...] = get_args(Scenario)

CUE_LEN = 32
"""Tokens of a passage that ask for the rest of it."""
PASSAGE_LEN = 96
"""Tokens of a passage, cue included."""

NUM_NEEDLES = 8
"""Numbers in a text that hides several."""

CITIES = (
    "Amsterdam", "Athens", "Berlin", "Boston", "Cairo", "Chicago", "Dublin", "Geneva", "Havana",
    "Istanbul", "Lima", "Lisbon", "London", "Madrid", "Melbourne", "Mumbai", "Nairobi", "Oslo",
    "Paris", "Prague", "Rome", "Seoul", "Singapore", "Stockholm", "Sydney", "Tokyo", "Toronto",
    "Vienna", "Warsaw", "Zurich",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A text, a question about it, and the answer, all as token ids.

    Its depth is where in the text the answer stands: 0 is its beginning, 1 its end.
    """

    context: list[int]
    question: list[int]
    answer: list[int]
    depth: float


@dataclass(frozen=True)
class Needle(Case):
    """A number hidden in prose, and the city that it belongs to."""

    digits: str
    city: str


AnyCase = TypeVar("AnyCase", bound=Case)


def passage(
    tokenizer: "PreTrainedTokenizerBase",
    texts: list[str],
    rng: random.Random,
    length: int,
    depth: float,
) -> Case:
    """Repeats the beginning of a passage of the text; the answer is the rest of the passage.

    Raises:
        EvaluationError: If texts and length do not fit; so do the other tasks.
    """
    begin = tokenizer.encode("")  # a BOS token, where the model wants one
    gap = encode(tokenizer, "\n\n")
    room = length - len(begin) - len(gap) - CUE_LEN
    if room < 2 * PASSAGE_LEN:
        raise EvaluationError(f"a prompt of {length} tokens has no room for a passage")
    hay = run_of_tokens(tokenizer, texts, rng, room)
    at = round(depth * (room - PASSAGE_LEN))
    cue, answer = hay[at : at + CUE_LEN], hay[at + CUE_LEN : at + PASSAGE_LEN]
    return Case([*begin, *hay], [*gap, *cue], answer, depth)


def needle(
    tokenizer: "PreTrainedTokenizerBase",
    texts: list[str],
    rng: random.Random,
    length: int,
    depth: float,
    num_needles: int = 1,
) -> Needle:
    """Hides magic numbers in prose, the one that is asked for at the depth, others anywhere."""
    cities = rng.sample(CITIES, num_needles)
    digits = [str(rng.randrange(10**6, 10**7)) for _ in cities]
    depths = [depth, *(rng.random() for _ in cities[1:])]  # the first is asked for
    facts = [f"The special magic number for {city} is" for city in cities]
    begin = tokenizer.encode("")  # a BOS token, where the model wants one
    hidden = [
        encode(tokenizer, f" {fact} {number}.") for fact, number in zip(facts, digits, strict=True)
    ]
    question = encode(tokenizer, f"\n\n{facts[0]}")
    room = length - len(begin) - sum(map(len, hidden)) - len(question)
    if room < 1:
        raise EvaluationError(f"a prompt of {length} tokens has no room for prose")

    sentences = _sentences(texts, rng)
    prose: list[int] = []
    ends = [0]
    while len(prose) < room:
        prose += encode(tokenizer, f" {_next(sentences, room)}")
        ends.append(len(prose))
    surplus = len(prose) - room  # cut at the front, where a sentence may begin in its middle
    ends = [0, *(end - surplus for end in ends if end > surplus)]
    places = [min(ends, key=lambda end: abs(end - each * room)) for each in depths]
    hay = prose[surplus:]
    for at, tokens in sorted(zip(places, hidden, strict=True), reverse=True):
        hay[at:at] = tokens
    return Needle(
        context=[*begin, *hay],
        question=question,
        answer=encode(tokenizer, f" {digits[0]}"),
        depth=round(places[0] / room, 3),
        digits=digits[0],
        city=cities[0],
    )


_MOST_PAIRS = 9000
"""As many as numbers of four digits."""


def pair(
    tokenizer: "PreTrainedTokenizerBase",
    texts: list[str],
    rng: random.Random,
    length: int,
    depth: float,
) -> Case:
    """Fills the prompt with numbered pairs of cities, without any texts, and asks for one."""
    begin = tokenizer.encode("")  # a BOS token, where the model wants one
    numbers = rng.sample(range(1000, 10000), min(length, _MOST_PAIRS))
    tokens: list[int] = []
    lines: list[tuple[int, list[int], list[int]]] = []
    while len(tokens) < length:
        if len(lines) == _MOST_PAIRS:
            raise EvaluationError(
                f"a prompt of {length} tokens takes more pairs than there are; shorten it"
            )
        cue = encode(tokenizer, f"\nRoute {numbers[len(lines)]} goes from")
        answer = encode(tokenizer, f" {' to '.join(rng.sample(CITIES, 2))}")
        lines.append((len(tokens), cue, answer))
        tokens += cue + answer
    # The surplus is cut at the front; whatever is asked, the tokens from here on are left.
    first = len(tokens) - length + len(begin) + max(len(cue) for _, cue, _ in lines)
    whole = [line for line in lines if line[0] >= first]
    if len(whole) < 2:
        raise EvaluationError(f"a prompt of {length} tokens has no room for pairs")
    at = first + depth * (len(tokens) - first)
    _, cue, answer = min(whole, key=lambda line: abs(line[0] - at))
    context = [*begin, *tokens[len(tokens) - length + len(begin) + len(cue) :]]
    return Case(context, cue, answer, depth)


Task = Callable[..., Case]
"""`(tokenizer, texts, rng, length, depth)` -> a prompt of so many tokens, question included."""

TASKS: dict[str, Task] = {
    "passage": passage,
    "needle": needle,
    "several": partial(needle, num_needles=NUM_NEEDLES),
    "pairs": pair,
}
"""Tasks by name."""

KINDS: dict[str, tuple[str, str | None]] = {
    "prose": ("passage", "sotu"),
    "code": ("passage", "stdlib"),
    "records": ("passage", "records"),
    "needles": ("needle", "sotu"),
    "several-needles": ("several", "sotu"),
    "pairs": ("pairs", None),
}
"""Kinds of questions: a key of `TASKS`, and what `read_texts` takes; None for a task that makes up
its texts."""


def spread(
    task: Callable[..., AnyCase],
    tokenizer: "PreTrainedTokenizerBase",
    texts: list[str],
    num_cases: int,
    length: int,
    seed: int,
) -> list[AnyCase]:
    """Makes cases of a task, whose depths spread evenly over their texts.

    Texts are cut and strung together to prompts of `length` tokens, question included. The same
    arguments give the same cases.

    Raises:
        EvaluationError: If texts and length do not fit.
    """
    rng = random.Random(seed)
    depths = [(index + 0.5) / num_cases for index in range(num_cases)]
    return [task(tokenizer, texts, rng, length, depth) for depth in depths]


def cases_of(
    tokenizer: "PreTrainedTokenizerBase", kind: str, num_cases: int, length: int, seed: int
) -> list[Case]:
    """Makes questions of a kind, one of `KINDS`, or a folder with texts to repeat passages of.

    Arguments and result are as of `spread`.

    Raises:
        EvaluationError: If there is no such folder, or texts and length do not fit.
    """
    task, source = KINDS.get(kind, ("passage", kind))
    texts = [] if source is None else read_texts(source)
    return spread(TASKS[task], tokenizer, texts, num_cases, length, seed)


def run_of_tokens(
    tokenizer: "PreTrainedTokenizerBase", texts: list[str], rng: random.Random, length: int
) -> list[int]:
    """Tokens from a random paragraph on, continuing with the next texts."""
    paragraphs = _split(texts, rng, r"\n\s*\n", "\n\n")
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += encode(tokenizer, _next(paragraphs, length))
    return tokens[:length]


def _sentences(texts: list[str], rng: random.Random) -> Iterator[str]:
    """Sentences from a random one on, continuing with the next texts."""
    # Three letters before the point: "Mr." and "U.S." end no sentence.
    for sentence in _split(texts, rng, r"(?<=[a-z]{3}[.!?])\s+", ""):
        yield " ".join(sentence.split())


def _split(texts: list[str], rng: random.Random, border: str, ending: str) -> Iterator[str]:
    first = rng.randrange(len(texts))
    for index in range(first, first + len(texts)):
        pieces = re.split(border, texts[index % len(texts)].strip())
        skipped = rng.randrange(len(pieces)) if index == first else 0
        yield from (piece + ending for piece in pieces[skipped:])


def _next(pieces: Iterator[str], length: int) -> str:
    for piece in pieces:
        return piece
    raise EvaluationError(f"the texts are too short for a prompt of {length} tokens")
