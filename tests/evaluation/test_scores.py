from dataclasses import replace

import pytest

from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.metrics import ENDED, READ_ALONG
from vllm_kvselect.evaluation.predictions import Budget, Prediction
from vllm_kvselect.evaluation.scores import Row, rows, scored
from vllm_kvselect.evaluation.settings import FULL
from vllm_kvselect.offline.tasks import Scenario

NUM_EXAMPLES = 4


def example(task: str, index: int, length: int = 2048) -> Example:
    return Example(
        name=f"{task}/{length}/{index}",
        task=task,
        length=length,
        context=(1, 2),
        question=(3,),
        references=("right",),
        metric="exact",
        max_tokens=4,
    )


EASY, HARD = ([example(task, index) for index in range(NUM_EXAMPLES)] for task in ("easy", "hard"))


def predicted(
    examples: list[Example],
    correct: str,
    method: str = FULL,
    budget: Budget | None = None,
    scenario: Scenario = "regular",
    through: str = "model",
    **measures: float,
) -> list[Prediction]:
    """An answer an example; `correct` says of each whether it is right: '1101'."""
    return [
        Prediction(
            example=each.name,
            scenario=scenario,
            method=method,
            budget=budget,
            through=through,
            text=" right." if right == "1" else "wrong",
            num_tokens=2,
            retained=0.25 if budget else 1.0,
            **measures,
        )
        for each, right in zip(examples, correct, strict=True)
    ]


def summary(
    examples: list[Example], *predictions: list[Prediction], against: str = FULL
) -> list[Row]:
    return rows(scored(examples, [each for some in predictions for each in some], against))


def test_scores_are_averaged_by_task() -> None:
    full, half = summary(
        EASY + HARD,
        predicted(EASY + HARD, "11111000"),
        predicted(EASY + HARD, "11010010", "snapkv", 0.5),
    )
    assert (full.method, full.budget, half.method, half.budget) == (FULL, None, "snapkv", 0.5)
    assert full.scores == {"easy": 1.0, "hard": 0.25}
    assert half.scores == {"easy": 0.75, "hard": 0.25}
    assert half.num_examples == {"easy": NUM_EXAMPLES, "hard": NUM_EXAMPLES}
    assert (full.retained, half.retained) == (1.0, 0.25)


def test_tasks_that_the_full_cache_cannot_do_do_not_count() -> None:
    full, half = summary(
        EASY + HARD,
        predicted(EASY + HARD, "11111100"),
        predicted(EASY + HARD, "11011111", "snapkv", 0.5),
    )
    assert full.score is not None
    assert half.score is not None
    assert (full.score.value, half.score.value) == (1.0, 0.75)
    (unsolved,) = summary(HARD, predicted(HARD, "1100"))
    assert unsolved.score is None


def test_tasks_weigh_the_same_whatever_their_number_of_examples() -> None:
    more = [example("more", index) for index in range(2 * NUM_EXAMPLES)]
    _, half = summary(
        EASY + more,
        predicted(EASY + more, "111111111111"),
        predicted(EASY + more, "000011111111", "snapkv", 0.5),
    )
    assert half.score is not None
    assert half.score.value == 0.5
    assert half.score.difference == -0.5


def test_differences_are_paired_by_example() -> None:
    """Both lose one example in four; only the pairs tell that one of them also gains one."""
    _, one, other = summary(
        EASY,
        predicted(EASY, "1110", nll=0.5),
        predicted(EASY, "1100", "snapkv", 0.5, nll=0.75),
        predicted(EASY, "1001", "random", 0.5, nll=0.75),
    )
    assert one.score is not None
    assert other.score is not None
    assert one.score.difference == other.score.difference == -0.25
    assert one.score.interval == (-0.75, 0.0)
    assert other.score.interval is not None
    assert other.score.interval[0] < -0.75
    assert other.score.interval[1] > 0.0
    assert one.nll is not None
    assert one.nll.interval == (0.25, 0.25)


def test_one_example_has_no_interval() -> None:
    _, half = summary(EASY[:1], predicted(EASY[:1], "1"), predicted(EASY[:1], "0", "snapkv", 0.5))
    assert half.score is not None
    assert (half.score.difference, half.score.interval) == (-1.0, None)


def test_each_is_compared_with_the_full_cache_of_its_own_way_and_scenario() -> None:
    found = summary(
        EASY,
        predicted(EASY, "1111"),
        predicted(EASY, "1110", through="engine"),
        predicted(EASY, "1110", scenario="context-only"),
        predicted(EASY, "1100", "snapkv", 0.5),
        predicted(EASY, "1100", "snapkv", 0.5, through="engine"),
        predicted(EASY, "1100", "snapkv", 0.5, scenario="context-only"),
        predicted(EASY, "1100", "peer-full", 0.5, through="peer"),
    )
    differences = [each.score and each.score.difference for each in found]
    assert differences == [None, None, None, -0.5, -0.25, -0.25, -0.5]


def test_budgets_of_another_type_are_other_budgets() -> None:
    found = summary(
        EASY,
        predicted(EASY, "1111"),
        predicted(EASY, "1111", "snapkv", 1),
        predicted(EASY, "0000", "snapkv", 512),
        predicted(EASY, "1110", "snapkv", 1.0),
    )
    assert [(each.budget, type(each.budget), each.scores["easy"]) for each in found] == [
        (None, type(None), 1.0),
        (1, int, 1.0),
        (512, int, 0.0),
        (1.0, float, 0.75),
    ]


def test_the_later_of_two_answers_counts_and_strangers_do_not() -> None:
    stranger = predicted([example("other", 0)], "1")
    (found,) = summary(EASY, predicted(EASY, "0000"), predicted(EASY, "1111"), stranger)
    assert found.scores == {"easy": 1.0}


def test_long_answers_are_compared_with_the_full_cache() -> None:
    one = replace(EASY[0], metric="like_full", references=())
    texts = {FULL: "a b c d", "snapkv": "a b x d"}
    predictions = [
        replace(predicted([one], "1", method, 0.5 if method != FULL else None)[0], text=text)
        for method, text in texts.items()
    ]
    full, other = rows(scored([one], predictions))
    assert full.scores == {"easy": 1.0}
    assert other.scores == {"easy": pytest.approx(0.75)}


def test_lengths_are_rows_of_their_own() -> None:
    longer = [example("easy", index, 4096) for index in range(NUM_EXAMPLES)]
    found = summary(EASY + longer, predicted(EASY + longer, "11111100"))
    assert [(each.length, each.scores["easy"]) for each in found] == [(2048, 1.0), (4096, 0.5)]


def test_differences_may_be_to_another_method_at_the_same_budget() -> None:
    found = summary(
        EASY,
        predicted(EASY, "1111", nll=0.5),
        predicted(EASY, "1110", "thetakv", 0.5, nll=0.75),
        predicted(EASY, "1100", "thetakv", 0.25, nll=1.0),
        predicted(EASY, "1111", "thetakv:lam=0.0", 0.5, nll=0.5),
        predicted(EASY, "1101", "thetakv:lam=0.0", 0.25, nll=1.5),
        against="thetakv",
    )
    scores = [each.score and each.score.difference for each in found]
    assert scores == [None, None, None, 0.25, 0.25]
    assert [each.nll and each.nll.difference for each in found] == [None, None, None, -0.25, 0.5]
    assert {each.against for each in found} == {"thetakv"}


def test_an_answer_that_is_read_along_scores_by_its_likeliest_tokens() -> None:
    given = [replace(each, metric=READ_ALONG, references=()) for each in EASY]
    full, half = summary(
        given,
        predicted(given, "0000", nll=0.1, accuracy=0.75),
        predicted(given, "0000", "snapkv", 0.5, nll=0.2, accuracy=0.5),
    )
    assert full.scores == {"easy": 0.75}
    assert half.score is not None
    assert (half.score.value, half.score.difference) == (0.5, -0.25)


def test_answers_that_a_model_ends_are_counted_and_their_lengths_compared() -> None:
    told = [replace(each, metric=ENDED, references=()) for each in EASY]
    full, half = (
        [replace(each, num_tokens=length) for each, length in zip(some, lengths, strict=True)]
        for some, lengths in (
            (predicted(told, "0000"), (4, 4, 2, 4)),
            (predicted(told, "0000", "snapkv", 1.0), (4, 3, 1, 4)),
        )
    )
    of_full, of_half = summary(told, full, half)
    assert (of_full.scores, of_half.scores) == ({"easy": 0.25}, {"easy": 0.5})
    assert of_full.tokens is not None
    assert of_half.tokens is not None
    assert (of_full.tokens.value, of_full.tokens.difference) == (3.5, None)
    assert (of_half.tokens.value, of_half.tokens.difference) == (3.0, -0.5)
    assert of_half.nll is None
