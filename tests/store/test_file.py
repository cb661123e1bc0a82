"""A file is taken only if all of it is what was written for its place."""

import json
from pathlib import Path
from random import Random

import pytest

from tests.store.contexts import context, place_of, same
from vllm_kvselect.store.file import FileError, Place, Stored, read_facts


def written(folder: Path, number: int = 1, **where: int) -> Path:
    stored = context(number, **where)
    path = folder / stored.facts.place.file
    stored.write(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_what_is_read_is_what_was_written_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    stored = context(7, dtype=dtype)
    path = tmp_path / stored.facts.place.file
    stored.write(path)
    assert same(Stored.read(path), stored)
    assert read_facts(path) == stored.facts


def test_a_file_is_readable_by_its_user_alone(tmp_path: Path) -> None:
    assert written(tmp_path).stat().st_mode & 0o777 == 0o600


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(FileExistsError):
        context(2).write(path)
    assert same(Stored.read(path), context(1))


def test_a_file_that_is_torn_or_goes_on_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    content = path.read_bytes()
    ends = [0, 1, 7, 8, 9, len(content) // 2, len(content) - 1]
    torn = [content[:end] for end in [*ends, *Random(0).sample(range(len(content)), 40)]]
    for found in [*torn, content + b"\0"]:
        path.write_bytes(found)
        with pytest.raises(FileError):
            Stored.read(path)


def test_no_bit_flip_changes_what_is_read(tmp_path: Path) -> None:
    path, random = written(tmp_path), Random(1)
    content = path.read_bytes()
    header = int.from_bytes(content[:8], "little")
    places = [*range(0, 8 + header), *random.sample(range(8 + header, len(content)), 200)]
    refused = 0
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << random.randrange(8)
        path.write_bytes(flipped)
        try:
            assert same(Stored.read(path), context(1))  # a space of the header, say
        except FileError:
            refused += 1
    assert refused > 0.9 * len(places)


@pytest.mark.parametrize("change", [{"num_tokens": 65}, {"version": 2}, {"unknown": 1}])
def test_changed_facts_are_refused(tmp_path: Path, change: dict[str, int]) -> None:
    path = written(tmp_path)
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    facts = json.loads(header["__metadata__"]["facts"])
    header["__metadata__"]["facts"] = json.dumps({**facts, **change})
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    with pytest.raises(FileError):
        Stored.read(path)
    if "version" in change:  # an older or newer one is named without its checksum
        with pytest.raises(FileError, match="another version"):
            read_facts(path)


def test_other_peoples_files_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / place_of(1).file
    tensors = {"pages": context(1).pages, "offsets": context(1).offsets}
    for metadata in (None, {"format": "pt"}, {"format": "vllm-kvselect-probe", "facts": "{}"}):
        save_file(tensors, path, metadata)
        with pytest.raises(FileError, match="no context of ours"):
            Stored.read(path)
    path.write_text("other people's")
    with pytest.raises(FileError):
        Stored.read(path)


@pytest.mark.parametrize("other", [place_of(2), place_of(1, 1, 2), place_of(1, 0, 2)])
def test_a_file_under_another_ones_name_is_refused(tmp_path: Path, other: Place) -> None:
    path = written(tmp_path).rename(tmp_path / other.file)
    with pytest.raises(FileError, match="it holds"):
        Stored.read(path)


def test_a_name_says_its_place_and_other_names_say_none() -> None:
    place = place_of(255, 1, 2)
    assert Place.of(place.file) == place
    for name in (f".{place.file}", place.file[1:], f"{place.file}.unfinished", "probe.safetensors"):
        assert Place.of(name) is None
