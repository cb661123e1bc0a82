"""Made-up records of the kinds that agents read: logs, tables, settings, steps and lists.

Prose and code have few numbers that nothing around them foretells, and no lists of equal words. A
probe that never saw any drops them first.
"""

import random
from collections.abc import Callable
from string import ascii_uppercase
from typing import Final
from uuid import UUID

_NUM_TEXTS, _NUM_PARAGRAPHS = 8, 100

_NAMES: Final = (
    "Amara", "Bjorn", "Chen", "Dalia", "Emeka", "Farid", "Greta", "Hiro", "Ines", "Jonas", "Kavya",
    "Liam", "Mona", "Nils", "Oksana", "Priya", "Rosa", "Sven", "Tariq", "Viktor", "Yusuf", "Zora",
)  # fmt: skip
_WORDS: Final = (
    "apple", "river", "copper", "window", "garden", "bridge", "candle", "paper", "silver", "market",
    "engine", "forest", "ladder", "mirror", "needle", "orange", "pencil", "rabbit", "saddle",
    "ticket", "valley", "whistle", "basket", "butter", "carpet", "feather", "hammer", "island",
    "jacket", "kettle", "magnet", "napkin", "oyster", "pepper", "ribbon", "shovel", "tunnel",
    "velvet", "wagon", "barrel", "cotton", "donkey", "ginger", "harbor", "jungle", "kitten",
    "lemon", "meadow", "onion", "parrot", "rocket", "spider", "temple", "violin", "walnut",
)  # fmt: skip
_STATES: Final = ("open", "closed", "pending", "failed", "queued", "paid", "refunded", "archived")
_NUM_REPEATED = 10
"""Words of a list that repeats some."""

_SHAPES: Final = (
    (4, "{time} INFO worker-{number} request {uuid} took {number} ms"),
    (
        4,
        '{{"id": "{uuid}", "owner": "{name}", "item": "{word}", "cost": {price}, "is": "{state}"}}',
    ),
    (8, "{number},{name},{word},{price},{state}"),
    (6, "{word}.{word} = {hex}"),
    (8, "set {letters} = {number}"),
    (8, "copy {letters} to {letters}"),
    (5, "The code of {name}'s {word} is {number}."),
    (24, "{line}. {repeated}"),
    (4, "tags: {repeated}, {repeated}, {repeated}, {repeated}, {repeated}, {repeated}"),
)
"""Lines of a paragraph, and what they look like; each field is drawn anew."""

_FIELDS: Final[dict[str, Callable[[random.Random], str]]] = {
    "hex": lambda rng: f"{rng.getrandbits(64):016x}",
    "letters": lambda rng: "".join(rng.choices(ascii_uppercase, k=5)),
    "name": lambda rng: rng.choice(_NAMES),
    "number": lambda rng: str(rng.randrange(10 ** rng.randint(2, 7))),
    "price": lambda rng: f"{rng.uniform(1, 1000):.2f}",
    "state": lambda rng: rng.choice(_STATES),
    "time": lambda rng: (
        f"2024-{rng.randint(1, 12):02}-{rng.randint(1, 28):02} "
        f"{rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02}"
    ),
    "uuid": lambda rng: str(UUID(int=rng.getrandbits(128), version=4)),
    "word": lambda rng: rng.choice(_WORDS),
}


def records() -> list[str]:
    """Texts of paragraphs in all shapes, the same every time."""
    rng = random.Random(0)
    return ["\n\n".join(_paragraph(rng) for _ in range(_NUM_PARAGRAPHS)) for _ in range(_NUM_TEXTS)]


def _paragraph(rng: random.Random) -> str:
    num_lines, shape = rng.choice(_SHAPES)
    few = rng.sample(_WORDS, _NUM_REPEATED)
    lines = (_Line(rng, line=str(number + 1), few=few) for number in range(num_lines))
    return "\n".join(map(shape.format_map, lines))


class _Line(dict[str, str]):
    """The fields of a line; one that is not given is drawn, anew wherever it stands."""

    def __init__(self, rng: random.Random, few: list[str], line: str) -> None:
        super().__init__(line=line)
        self._rng, self._few = rng, few

    def __missing__(self, name: str) -> str:
        return self._rng.choice(self._few) if name == "repeated" else _FIELDS[name](self._rng)
