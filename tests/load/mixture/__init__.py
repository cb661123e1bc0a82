"""Requests of every kind, served together: whatever runs beside it, each gives what it gives alone.

`draw` makes the requests, `serve` has an engine answer them, `difference` compares two answers of
one request. For tests of an engine; nothing that serves imports it.
"""

from tests.load.mixture.answers import Answer, assert_as_alone, difference
from tests.load.mixture.requests import (
    BLOCK_SIZE,
    DENSE,
    GREEDY,
    KINDS,
    LONG,
    LORA_ADAPTER,
    MAX_MODEL_LEN,
    SERVER,
    SETTINGS,
    WITHOUT_TOKENIZER,
    Request,
    draw,
)
from tests.load.mixture.serving import serve, serve_alone

__all__ = [
    "BLOCK_SIZE",
    "DENSE",
    "GREEDY",
    "KINDS",
    "LONG",
    "LORA_ADAPTER",
    "MAX_MODEL_LEN",
    "SERVER",
    "SETTINGS",
    "WITHOUT_TOKENIZER",
    "Answer",
    "Request",
    "assert_as_alone",
    "difference",
    "draw",
    "serve",
    "serve_alone",
]
