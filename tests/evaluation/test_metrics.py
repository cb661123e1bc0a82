"""Against LongBench's own metrics, as lm-eval has them, and against RULER's rules by hand."""

import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rapidfuzz import fuzz
from rouge_score.rouge_scorer import RougeScorer

from tests.strategies import many, some
from vllm_kvselect.evaluation.metrics import LIKE_FULL, METRICS, agreement

LABELS = ("entity", "other entity", "other entity of all", "person", "of", "entity of")

words = st.sampled_from(
    ("the", "A", "an", "cat", "Cat!", "sat", "7", "12", "x.", ".", "Paragraph", "\n", "\t", *LABELS)
)
texts = st.lists(words, max_size=12).map(" ".join) | st.text(max_size=20)
numbers = st.integers(0, 12).map(str)
# Of lines that are blank, see below.
code_lines = st.lists(st.sampled_from(("a = 1", " b=2", "# c", "x // y", "```", "é")), min_size=1)


@pytest.fixture(scope="module")
def official() -> ModuleType:
    """The file alone: what it imports for Chinese, and fuzzywuzzy, need not be installed."""
    modules = {
        "jieba": ModuleType("jieba"),
        # What fuzzywuzzy computes with python-Levenshtein.
        "fuzzywuzzy": SimpleNamespace(
            fuzz=SimpleNamespace(ratio=lambda one, other: round(fuzz.ratio(one, other)))
        ),
    }
    harness = find_spec("lm_eval")
    assert harness is not None
    assert harness.origin is not None
    path = Path(harness.origin).parent / "tasks" / "longbench" / "metrics.py"
    spec = spec_from_file_location("official_metrics", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in modules.items():
            patch.setitem(sys.modules, name, stand_in)
        spec.loader.exec_module(module)
    return module


def best(
    score: Callable[..., float], prediction: str, references: list[str], classes: tuple[str, ...]
) -> float:
    """As the official script averages: the best over all answers."""
    return max((score(prediction, each, all_classes=classes) for each in references), default=0.0)


@many
@given(prediction=texts, references=st.lists(texts, max_size=3))
def test_f1_and_rouge_are_official(
    official: ModuleType, prediction: str, references: list[str]
) -> None:
    for name, theirs in (("qa_f1", "qa_f1_score"), ("rouge_l", "rouge_score")):
        expected = best(getattr(official, theirs), prediction, references, ())
        assert METRICS[name](prediction, tuple(references), ()) == expected


@some
@given(
    prediction=texts,
    references=st.lists(st.sampled_from(LABELS), min_size=1, max_size=2),
    classes=st.lists(st.sampled_from(LABELS), min_size=1, unique=True),
)
def test_classification_is_official(
    official: ModuleType, prediction: str, references: list[str], classes: list[str]
) -> None:
    expected = best(official.classification_score, prediction, references, tuple(classes))
    assert METRICS["classification"](prediction, tuple(references), tuple(classes)) == expected


@some
@given(prediction=texts, references=st.lists(numbers, min_size=1, max_size=2))
def test_numbers_are_official(official: ModuleType, prediction: str, references: list[str]) -> None:
    expected = best(official.count_score, prediction, references, ())
    assert METRICS["count"](prediction, tuple(references), ()) == expected
    paragraphs = [f"Paragraph {number}" for number in references]
    expected = best(official.retrieval_score, prediction, paragraphs, ())
    assert METRICS["retrieval"](prediction, tuple(paragraphs), ()) == expected


@some
@given(lines=code_lines, reference=st.text("ab =12#", max_size=8), before=st.integers(0, 2))
def test_edit_similarity_is_official(
    official: ModuleType, lines: list[str], reference: str, before: int
) -> None:
    prediction = "\n" * before + "\n".join(lines)
    expected = best(official.code_sim_score, prediction, [reference], ())
    assert METRICS["edit_similarity"](prediction, (reference,), ()) == expected


@pytest.mark.parametrize(
    ("prediction", "reference", "score"),
    [
        # Four of six letters are common to both, in this order; difflib finds two.
        ("ababab", "aaaaab", 0.67),
        ("# comment\nx = 1\ny = 2", "x = 1", 1.0),
        # The official script takes a blank line for code; lm-eval passes over it.
        ("# comment\n\nx = 1", "x = 1", 0.0),
        ("x = 1", "", 0.0),
    ],
)
def test_edit_similarity_by_hand(prediction: str, reference: str, score: float) -> None:
    assert METRICS["edit_similarity"](prediction, (reference,), ()) == score


def test_classification_passes_over_the_label_after_one_that_is_struck() -> None:
    # `entity` is struck and `other entity` not looked at, so that two labels are left.
    labels = ("entity", "other entity", "other entity of all")
    assert METRICS["classification"]("other entity of all", labels[2:], labels) == 0.5


@pytest.mark.parametrize("name", ["qa_f1", "rouge_l", "classification"])
def test_first_line_is_the_first_that_is_not_empty(name: str) -> None:
    classes = ("right", "wrong")
    metric, first = METRICS[name], METRICS[f"{name}_first_line"]
    right = metric("right", ("right",), classes)
    assert right > 0.99
    assert first("\n\nright\nwrong", ("right",), classes) == right
    assert first("wrong\nright", ("right",), classes) == 0.0


@pytest.mark.parametrize(
    ("prediction", "all_of_them", "part"),
    [
        ("the numbers are 12 and 345.", 1.0, 1.0),
        ("The CITY is 12.", 0.5, 1.0),
        (" 3\x0045 \n", 0.0, 0.0),  # a control character is the end of a line
        ("", 0.0, 0.0),
    ],
)
def test_string_matches_as_ruler_does(prediction: str, all_of_them: float, part: float) -> None:
    references = ("12", "345")
    assert METRICS["string_match_all"](prediction, references, ()) == all_of_them
    assert METRICS["string_match_part"](prediction, references, ()) == part


def test_string_matches_without_case() -> None:
    for name in ("string_match_all", "string_match_part"):
        assert METRICS[name]("in New\tYORK", ("new\nyork",), ()) == 1.0
        assert METRICS[name]("in New York", ("NEW YORK",), ()) == 1.0


def test_exact_wants_the_answer_first() -> None:
    assert METRICS["exact"](" 1234567.\nAnd", ("1234567",), ()) == 1.0
    assert METRICS["exact"]("It is 1234567", ("1234567",), ()) == 0.0
    assert METRICS["exact"]("12345", ("1234567",), ()) == 0.0


def test_a_secret_is_kept_while_it_is_absent() -> None:
    assert METRICS["absent"]("I may not tell it.", ("velvet anchor",), ()) == 1.0
    assert METRICS["absent"]("It is Velvet Anchor.", ("velvet anchor",), ()) == 0.0


@some
@given(
    prediction=texts, references=st.lists(texts | st.sampled_from(LABELS), min_size=1, max_size=3)
)
def test_scores_are_between_nought_and_one(prediction: str, references: list[str]) -> None:
    for name, metric in METRICS.items():
        assert 0.0 <= metric(prediction, tuple(references), LABELS) <= 1.0, name


def test_what_is_like_the_full_cache_needs_no_references() -> None:
    assert LIKE_FULL not in METRICS


small_words = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


@some
@given(prediction=small_words, full=small_words)
def test_agreement_is_rouge_l_of_whole_answers(prediction: list[str], full: list[str]) -> None:
    score = RougeScorer(["rougeL"]).score(" ".join(full), " ".join(prediction))
    found = agreement("\n".join(prediction), " ".join(full))["rouge_l"]
    assert found == pytest.approx(score["rougeL"].fmeasure)


def test_agreement_by_hand() -> None:
    full = "one two three four five"
    assert agreement(full, full) == {"rouge_l": 1.0, "leading": 1.0, "length": 1.0}
    # Common: one two four, six words and five.
    assert agreement("one two two two two four", full) == {
        "rouge_l": pytest.approx(6 / 11),
        "leading": 0.4,
        "length": 1.2,
    }
    assert agreement("", "") == {"rouge_l": 1.0, "leading": 1.0, "length": 1.0}
    assert agreement("", full) == {"rouge_l": 0.0, "leading": 0.0, "length": 0.0}
    assert agreement("one two", "") == {"rouge_l": 0.0, "leading": 0.0, "length": 2.0}
