"""How FlashAttention 3 shares out the sequences of a call among the processors of a card."""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil


def parts(num_tiles: Sequence[int], num_processors: int, most: int) -> list[int]:
    """Into how many parts each sequence is cut.

    Args:
        num_tiles: Of each sequence.
        num_processors: Of the card; each is meant to get a tenth more than its share of all tiles.
        most: Parts of a sequence.
    """
    share = max(ceil(Fraction(11 * sum(num_tiles), 10 * num_processors)), 1)
    return [max(1, min(ceil(Fraction(tiles, share)), most)) for tiles in num_tiles]


def schedule(
    lengths: Sequence[int], tile: int, num_processors: int, most: int, num_vectors: int
) -> list[list[int]]:
    """Vectors of sequences of one query and one head, and what is handed out before any starts."""
    num_tiles = [ceil(Fraction(length, tile)) for length in lengths]
    ones = [1] * len(lengths)
    cut = parts(num_tiles, num_processors, most)
    return [*[ones, cut, ones][:num_vectors], [0]]
