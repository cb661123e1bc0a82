"""A folder that servers share: complete or absent, bounded, and nobody's mistake is another's."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.store.contexts import context, place_of, same
from vllm_kvselect.config import ConfigError
from vllm_kvselect.store.file import FileError
from vllm_kvselect.store.folder import Folder

ROOT = Path(__file__).parents[2]
WRITER = """
import sys
from pathlib import Path
from tests.store.contexts import context
from vllm_kvselect.store.folder import Folder
folder = Folder(Path(sys.argv[1]))
print("ready", flush=True)
for turn in range(int(sys.argv[2])):
    for number in range(20):
        folder.write(context(number))
"""


def file_bytes(tmp_path: Path) -> int:
    Folder(tmp_path / "one").make()
    Folder(tmp_path / "one").write(context(0))
    [entry] = Folder(tmp_path / "one").entries()
    return entry.num_bytes


def left_beside(path: Path) -> list[str]:
    return [each.name for each in path.iterdir() if each.name.startswith(".")]


def test_a_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "a" / "b")
    folder.make()
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.make()


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no folder that can be read"):
        Folder(tmp_path / "file").make()


def test_a_context_is_there_once_it_is_written(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert folder.version(place_of(1)) is None
    assert folder.version(place_of(1)) is None
    assert folder.write(context(1))
    assert folder.version(place_of(1)) is not None
    assert same(folder.read(place_of(1)), context(1))
    assert not left_beside(tmp_path)
    with pytest.raises(FileNotFoundError):
        folder.read(place_of(2))


def test_a_file_that_takes_anothers_place_has_another_version(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write(context(1))
    before = folder.version(place_of(1))
    folder.write(context(1))
    assert folder.version(place_of(1)) != before


def test_the_least_recently_used_contexts_make_room(tmp_path: Path) -> None:
    size = file_bytes(tmp_path)
    folder = Folder(tmp_path / "folder", 4 * size + 4096)
    folder.make()
    for number in range(4):
        folder.write(context(number))
        os.utime(folder.path / place_of(number).file, (1000 + number, 1000 + number))
    folder.read(place_of(0))
    folder.write(context(4))
    assert [entry.place for entry in folder.entries()] == [*map(place_of, (2, 3, 0, 4))]


def test_ranks_of_a_context_go_together(tmp_path: Path) -> None:
    size = file_bytes(tmp_path)
    folder = Folder(tmp_path / "folder", 5 * size)
    folder.make()
    for rank in range(2):
        for number in range(2):
            folder.write(context(number, rank, 2))
            used = 1000 + 10 * rank + number
            os.utime(folder.path / place_of(number, rank, 2).file, (used, used))
    folder.write(context(2, 0, 2))
    assert {entry.place.name for entry in folder.entries()} == {place_of(1).name, place_of(2).name}


def test_a_thousand_contexts_go_through_a_bound_of_a_hundred(tmp_path: Path) -> None:
    size = file_bytes(tmp_path)
    folder = Folder(tmp_path / "folder", 100 * size)
    folder.make()
    stored, most = context(0), 0
    for number in range(1000):
        facts = stored.facts.model_copy(update={"name": place_of(number).name})
        folder.write(stored._replace(facts=facts))
        if number % 50 == 49:
            most = max(most, sum(entry.num_bytes for entry in folder.entries()))
    assert most <= 100 * size
    places = {entry.place for entry in folder.entries()}
    assert places == {place_of(number) for number in range(1000 - len(places), 1000)}
    assert len(places) >= 98


def test_what_is_larger_than_the_bound_is_not_written_and_nothing_makes_room(
    tmp_path: Path,
) -> None:
    Folder(tmp_path).write(context(1))
    assert not Folder(tmp_path, 1000).write(context(2))
    assert [entry.place for entry in Folder(tmp_path).entries()] == [place_of(1)]


def test_other_peoples_files_are_left_alone_and_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x" * 100_000)
    folder = Folder(tmp_path, 2 * file_bytes(tmp_path) + 4096)
    for number in range(5):
        folder.write(context(number))
    assert (tmp_path / "notes.txt").exists()
    assert len(folder.entries()) == 2


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """A disk that is full after so many bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write(context(1))
    with files_of_at_most(2000), pytest.raises(OSError, match="File too large"):
        folder.write(context(2))
    assert [path.name for path in tmp_path.iterdir()] == [place_of(1).file]
    folder.write(context(2))
    assert same(folder.read(place_of(2)), context(2))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_device_without_room_is_an_error_of_the_system(tmp_path: Path) -> None:
    path = tmp_path / place_of(1).file
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="exists"):  # never written through what is there
        context(1).write(path)


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    path.chmod(0o500)
    try:
        yield
    finally:
        path.chmod(0o700)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_only_read_is_read(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write(context(1))
    with read_only(tmp_path):
        folder.make()
        assert same(folder.read(place_of(1)), context(1))
        with pytest.raises(PermissionError):
            folder.write(context(2))


def test_abandoned_files_go_and_those_being_written_stay(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 10**9)
    old, new = (tmp_path / f".{place_of(1).file}.{name}.unfinished" for name in ("a", "b"))
    for path in (old, new):
        path.write_bytes(b"half")
    hours_ago = time.time() - 7200
    os.utime(old, (hours_ago, hours_ago))
    folder.write(context(2))
    assert (old.exists(), new.exists()) == (False, True)


def start_writer(path: Path, turns: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(turns)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_writer_that_is_killed_leaves_whole_files_only(tmp_path: Path) -> None:
    process = start_writer(tmp_path, 10**6)
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    process.kill()
    process.communicate()
    entries = Folder(tmp_path).entries()
    assert entries
    assert all(Folder(tmp_path).problem(entry.place) is None for entry in entries)


def test_two_writers_and_a_reader_at_once_see_whole_files_only(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path, 3) for _ in range(2)]
    folder, num_read = Folder(tmp_path), 0
    deadline = time.monotonic() + 60
    while any(writer.poll() is None for writer in writers) and time.monotonic() < deadline:
        for number in range(20):
            try:
                assert same(folder.read(place_of(number)), context(number))
                num_read += 1
            except FileNotFoundError:
                pass
    assert num_read
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    assert len(folder.entries()) == 20
    assert not left_beside(tmp_path)


def test_two_folders_that_make_room_at_once_miss_nothing(tmp_path: Path) -> None:
    """Another process removes a file between listing and removing."""
    folder = Folder(tmp_path)
    folder.write(context(1))
    entries = folder.entries()
    assert folder.remove(entries) == 1
    assert folder.remove(entries) == 0


def test_a_damaged_file_is_a_problem_with_a_reason(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write(context(1))
    path = tmp_path / place_of(1).file
    path.write_bytes(path.read_bytes()[:-1])
    assert folder.problem(place_of(1))
    with pytest.raises(FileError):
        folder.read(place_of(1))
