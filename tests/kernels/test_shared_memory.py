"""Every kernel compiles for every card that is accepted, and fits its shared memory.

Compiled are, in bfloat16, all of them at heads of 128 channels for each architecture, and at 64 and
256 those that multiply tiles, whose memory depends on it; all at each size for sm_89, which has the
least. What moves fp8 is compiled everywhere, what may read it from sm_89 on, and products of
float32 at 256 where there is least memory.
"""

from pathlib import Path

import pytest

from tests.kernels.compiled import SHARED_BYTES
from tests.kernels.test_triton import KERNELS
from tests.own_process import said_by
from vllm_kvselect.kernels.triton import products

pytestmark = pytest.mark.timeout(1000)  # a card takes minutes on a busy machine

CARDS = (
    *(pytest.param(card, marks=pytest.mark.load) for card in (80, 90, 100, 120)),
    89,  # with least memory
)
"""Compute capabilities; 86 is compiled as 89 is, with the same memory."""


def compiled(card: int, folder: Path) -> dict[str, int]:
    """Shared memory of each kernel on a card.

    What Triton has compiled is kept in the folder, by its sources and by Triton's own.
    """
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    ((_, found),) = said_by("tests.kernels.compiled", str(card), **settings).items()
    return dict(found)


@pytest.mark.parametrize("card", CARDS)
def test_every_kernel_fits_the_shared_memory_of_a_card(
    card: int, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    kept = getattr(pytestconfig, "cache", None)
    shared = compiled(card, kept.mkdir("triton") if kept else tmp_path)
    assert set(shared) == {
        f"{Path(str(module.__file__)).stem}.{name}"
        for module in KERNELS
        for name in vars(module)
        if name.endswith("_kernel")
    }
    # With room: another release of Triton may take a little more.
    assert max(shared.values()) <= SHARED_BYTES[card] - 1024, shared


@pytest.mark.parametrize("limit", [99, 163, 227])
def test_tiles_of_shared_memory_follow_from_the_limit(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "shared_bytes", lambda: limit * 1024)
    assert products.tile_bytes() == (2**14 if limit == 99 else 2**15)
