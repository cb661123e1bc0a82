"""Compressed contexts for tests of the folder."""

import torch

from vllm_kvselect.store.file import Facts, Place, Stored

LAYERS, BLOCKS, HEADS, SIZE, WIDTH = 2, 3, 2, 4, 16


def place_of(number: int, rank: int = 0, num_ranks: int = 1) -> Place:
    return Place(f"{number:064x}", rank, num_ranks)


def context(number: int, rank: int = 0, num_ranks: int = 1, dtype: str = "float32") -> Stored:
    """One whose numbers nobody else's has."""
    shape = (LAYERS, BLOCKS, HEADS, SIZE, WIDTH)
    generator = torch.Generator().manual_seed((1000 * number + rank) % 2**61)
    pages = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
    place = place_of(number, rank, num_ranks)
    facts = Facts(
        written_by="test",
        **place._asdict(),
        model="model",
        method="layer-keydiff",
        num_tokens=64,
        num_blocks=BLOCKS,
    )
    offsets = torch.arange(LAYERS * (HEADS + 1), dtype=torch.int32).view(LAYERS, HEADS + 1)
    return Stored(pages, offsets, facts)


def same(one: Stored, other: Stored) -> bool:
    """Bit by bit."""
    return (
        one.facts == other.facts
        and torch.equal(one.pages.view(torch.uint8), other.pages.view(torch.uint8))
        and torch.equal(one.offsets, other.offsets)
    )
