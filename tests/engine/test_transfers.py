"""A worker's files of contexts: written in the background, read whole, never waited for in vain."""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.store.contexts import BLOCKS, HEADS, LAYERS, SIZE, WIDTH, context, place_of
from vllm_kvselect.engine.notice import Load
from vllm_kvselect.engine.states import worker_files as module
from vllm_kvselect.engine.states.worker_files import Shape, Transfers
from vllm_kvselect.store.file import Stored
from vllm_kvselect.store.folder import Folder

SHAPE = Shape(LAYERS, (HEADS, SIZE, WIDTH), torch.float32)
OFFSETS = torch.tensor([[0, 1, 6], [6, 8, 12]], dtype=torch.int32)
IDS = [5, 6, 7]


def of(number: int, **changes: Any) -> Stored:
    return context(number)._replace(**{"offsets": OFFSETS, **changes})


def made(folder: Path, max_bytes: int | None = None) -> Transfers:
    return Transfers(Folder(folder, max_bytes), 0, 1, "model", SHAPE, lambda numbers: numbers)


def save(transfers: Transfers, number: int) -> bool:
    if not transfers.may_save():
        return False
    transfers.save(place_of(number).name, of(number).pages, OFFSETS, 64, "keydiff")
    return True


def counts(transfers: Transfers, number: int) -> tuple[int, int]:
    """What was written, once so many are over."""
    stored = failed = 0
    for _ in range(500):
        more = transfers.take_counts()
        stored, failed = stored + more[0], failed + more[1]
        if stored + failed >= number:
            break
        time.sleep(0.01)
    return stored, failed


def arrived(transfers: Transfers) -> list[tuple[int, list[int], Stored | None]]:
    for _ in range(500):
        if found := list(transfers.arrived(True)):
            return found
    raise AssertionError("nothing arrives")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    lines: list[str] = []
    logger = logging.getLogger("vllm.kvselect")
    monkeypatch.setattr(logger, "warning", lambda text, *args: lines.append(text % args))
    return lines


def test_what_is_saved_arrives_bit_by_bit(tmp_path: Path) -> None:
    transfers = made(tmp_path)
    assert save(transfers, 1)
    assert counts(transfers, 1) == (1, 0)
    transfers.begin({9: Load(place_of(1).name, IDS)})
    [(number, block_ids, stored)] = arrived(transfers)
    assert (number, block_ids) == (9, IDS)
    assert stored is not None
    assert torch.equal(stored.pages, of(1).pages)
    assert torch.equal(stored.offsets, OFFSETS)
    assert list(transfers.arrived(True)) == []
    transfers.close()


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        (of(1, pages=context(1).pages[:1]), "pages of"),
        (of(1, pages=context(1).pages[:, :2]), "pages of"),
        (of(1, pages=context(1).pages.double()), "pages of"),
        (of(1, offsets=OFFSETS[:, :2]), "offsets of"),
        (of(1, offsets=OFFSETS.flip(0)), "no run of pages"),
        (of(1, offsets=OFFSETS + 1), "no run of pages"),
        (of(1, offsets=OFFSETS * 2), "no run of pages"),
        (of(1, offsets=torch.zeros_like(OFFSETS)), "no run of pages"),
        (of(1, offsets=torch.tensor([[0, 7, 6], [6, 8, 12]], dtype=torch.int32)), "no run"),
    ],
)
def test_what_does_not_fit_this_cache_is_a_miss_with_one_line(
    tmp_path: Path, said: list[str], stored: Stored, why: str
) -> None:
    transfers = made(tmp_path)
    Folder(tmp_path).write(stored)
    transfers.begin({1: Load(place_of(1).name, IDS)})
    assert arrived(transfers) == [(1, IDS, None)]
    assert len(said) == 1
    assert why in said[0]
    assert len(IDS) == BLOCKS


def test_a_file_that_is_gone_is_a_miss(tmp_path: Path, said: list[str]) -> None:
    transfers = made(tmp_path)
    transfers.begin({1: Load(place_of(1).name, IDS)})
    assert arrived(transfers) == [(1, IDS, None)]
    assert "No such file" in said[0]


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, said: list[str]) -> None:
    transfers = made(tmp_path / "nowhere")
    for number in range(3):
        assert save(transfers, number)
        assert counts(transfers, 1) == (0, 1)
    assert len(said) == 1
    assert "No such file" in said[0]
    (tmp_path / "nowhere").mkdir()  # mounted again
    save(transfers, 4)
    assert counts(transfers, 1) == (1, 0)


def test_a_context_larger_than_the_bound_is_not_stored(tmp_path: Path, said: list[str]) -> None:
    transfers = made(tmp_path, 100)
    save(transfers, 1)
    assert counts(transfers, 1) == (0, 1)
    assert "context_store_bytes" in said[0]


def test_a_slow_disk_takes_no_more_memory_than_a_few_contexts(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers, go = made(tmp_path), threading.Event()
    write = Folder.write
    monkeypatch.setattr(Folder, "write", lambda *args: go.wait(20) and write(*args))
    saved = [save(transfers, number) for number in range(7)]
    assert saved == [True] * 4 + [False] * 3
    assert len(said) == 1
    go.set()
    assert counts(transfers, 7) == (4, 3)


def test_a_folder_that_does_not_answer_is_a_miss_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers, go = made(tmp_path), threading.Event()
    Folder(tmp_path).write(of(1))
    read = Folder.read
    monkeypatch.setattr(Folder, "read", lambda *args: go.wait(20) and read(*args))
    monkeypatch.setattr(module, "_MOST_SECONDS", 0.05)
    transfers.begin({1: Load(place_of(1).name, IDS)})
    assert arrived(transfers) == [(1, IDS, None)]
    go.set()


def test_a_load_that_was_dropped_never_arrives(tmp_path: Path) -> None:
    transfers = made(tmp_path)
    Folder(tmp_path).write(of(1))
    transfers.begin({1: Load(place_of(1).name, IDS), 2: Load(place_of(1).name, IDS)})
    transfers.drop([1, 7])
    assert [number for number, *_ in arrived(transfers)] == [2]


def test_ranks_go_on_with_what_all_of_them_have(tmp_path: Path) -> None:
    """Another rank is still reading the first, has the second, and could not read the third."""
    others = {1: [1, 2, 0], 2: [2]}
    Folder(tmp_path).write(of(1))

    def agree(numbers: list[int]) -> list[int]:
        rank = others[1] if len(numbers) == 3 else others[2]
        return [min(pair) for pair in zip(numbers, rank, strict=True)]

    transfers = Transfers(Folder(tmp_path), 0, 1, "model", SHAPE, agree)
    transfers.begin({number: Load(place_of(1).name, IDS) for number in (1, 2, 3)})
    for reading in transfers._reading.values():
        reading.future.result(20)
    first = list(transfers.arrived(True))
    assert [(number, stored is not None) for number, _, stored in first] == [(2, True), (3, False)]
    assert [number for number, *_ in transfers.arrived(True)] == [1]
