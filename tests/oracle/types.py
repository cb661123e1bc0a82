"""Nested lists, as `tensor.tolist()` gives them."""

from collections.abc import Sequence

Vector = Sequence[float]
Matrix = Sequence[Vector]
Cube = Sequence[Matrix]
