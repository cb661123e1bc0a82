"""Against the package that LongBench's scripts call, wherever that does not give up."""

import sys
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rouge import Rouge

from tests.strategies import many, some
from vllm_kvselect.evaluation.rouge_l import rouge_l

ENDLESS = " ".join(map(str, range(3000)))

# Few different ones, so that several subsequences are as long.
words = st.sampled_from(("a", "b", "c", "D", "d,", ".", " ", "\n"))
texts = st.lists(words, max_size=40).map(" ".join) | st.text(max_size=20)


def official(prediction: str, reference: str) -> float:
    """As LongBench's script calls it."""
    try:
        scores = Rouge(metrics=["rouge-l"]).get_scores(prediction, reference)
    except ValueError:  # no sentence at all
        return 0.0
    return float(scores[0]["rouge-l"]["f"])


@many
@given(prediction=texts, reference=texts)
@example(prediction="a b c a", reference="a c b a")
@example(prediction="a . b", reference=" . ")
@example(prediction="...", reference="a")
def test_scores_are_the_packages_to_the_last_bit(prediction: str, reference: str) -> None:
    assert rouge_l(prediction, reference) == official(prediction, reference)


@some
@given(
    prediction=st.lists(st.integers(0, 30), min_size=100, max_size=150),
    reference=st.lists(st.integers(0, 30), min_size=100, max_size=150),
)
def test_scores_of_long_sentences_are_the_packages(
    prediction: list[int], reference: list[int]
) -> None:
    texts = [" ".join(map(str, each)) for each in (prediction, reference)]
    assert rouge_l(*texts) == official(*texts)


@pytest.mark.parametrize("text", ["", "..."])
def test_no_words_score_nought(text: str) -> None:
    assert rouge_l(text, ENDLESS) == rouge_l(ENDLESS, text) == 0.0


def test_a_sentence_without_end_is_scored_as_any_other() -> None:
    half = " ".join(map(str, range(0, 3000, 2)))
    assert rouge_l(ENDLESS, ENDLESS) == pytest.approx(1.0)
    assert rouge_l(half, ENDLESS) == pytest.approx(2 / 3)
    assert rouge_l(ENDLESS, half) == pytest.approx(2 / 3)
    assert rouge_l("x " * 3000, ENDLESS) == 0.0


def test_the_package_gives_up_on_a_sentence_without_end() -> None:
    with pytest.raises(RecursionError):
        with_frames_left(150, lambda: official(*[" ".join(map(str, range(300)))] * 2))


def test_the_score_depends_on_no_recursion_limit() -> None:
    assert with_frames_left(150, lambda: rouge_l(ENDLESS, ENDLESS)) == pytest.approx(1.0)


def with_frames_left(num_frames: int, compute: Callable[[], float]) -> float:
    """What is computed so deep in the stack that no more frames are left, whatever the limit is."""
    frame, depth = sys._getframe(), 0
    while frame := frame.f_back:
        depth += 1

    def descend(num_left: int) -> float:
        return compute() if num_left <= 0 else descend(num_left - 1)

    return descend(sys.getrecursionlimit() - depth - num_frames)
