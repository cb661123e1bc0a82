import re

import pytest
from transformers import PreTrainedTokenizerBase

from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.tasks import (
    CUE_LEN,
    NUM_NEEDLES,
    PASSAGE_LEN,
    TASKS,
    cases_of,
    needle,
    pair,
    passage,
    spread,
)
from vllm_kvselect.offline.texts import read_texts

TEXTS = [
    "\n\n".join(f"Paragraph {n} of text {t} speaks of matter {n * t + 7}." for n in range(60))
    for t in range(3)
]


@pytest.mark.parametrize("task", TASKS)
def test_cases_have_the_length_and_are_the_same_every_time(
    task: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    cases = spread(TASKS[task], tokenizer, TEXTS, 3, 400, 1)
    assert [len(case.context + case.question) for case in cases] == [400] * 3
    assert cases == spread(TASKS[task], tokenizer, TEXTS, 3, 400, 1)
    assert cases != spread(TASKS[task], tokenizer, TEXTS, 3, 400, 2)


def test_records_are_asked_for_and_read(tokenizer: PreTrainedTokenizerBase) -> None:
    lines = {line for text in read_texts("records") for line in text.splitlines()}
    (case,) = cases_of(tokenizer, "records", 1, 600, 0)
    whole = tokenizer.decode(case.context).splitlines()[1:-1]
    assert len(whole) > 10
    assert lines.issuperset(whole)


def test_passage_stands_in_the_text_at_its_depth(tokenizer: PreTrainedTokenizerBase) -> None:
    for case in spread(passage, tokenizer, TEXTS, 4, 600, 0):
        tokens = case.question[-CUE_LEN:] + case.answer
        assert len(tokens) == PASSAGE_LEN
        at = round(case.depth * (len(case.context) - PASSAGE_LEN))
        assert case.context[at : at + PASSAGE_LEN] == tokens


def test_needle_stands_in_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    for each in spread(needle, tokenizer, TEXTS, 4, 400, 0):
        context = tokenizer.decode(each.context)
        assert f"The special magic number for {each.city} is {each.digits}." in context
        assert tokenizer.decode(each.question).endswith(f"number for {each.city} is")
        assert tokenizer.decode(each.answer).strip() == each.digits


def test_several_needles_stand_in_the_text_and_one_is_asked_for(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    prose = [text.replace(" speaks", ", says the author. It speaks") for text in TEXTS]
    many = spread(TASKS["several"], tokenizer, prose, 4, 800, 0)
    for each in many:
        context = tokenizer.decode(each.context)
        hidden = re.findall(r"The special magic number for (\w+) is (\d{7})[.]", context)
        assert len(dict(hidden)) == NUM_NEEDLES
        assert dict(hidden)[each.city] == each.digits
        fact = f"The special magic number for {each.city} is"
        assert tokenizer.decode(each.question) == f"\n\n{fact}"
        assert abs(context.index(fact) / len(context) - each.depth) < 0.2
    assert [round(each.depth - (at + 0.5) / 4, 1) for at, each in enumerate(many)] == [0] * 4


def test_pairs_ask_for_one_of_the_lines(tokenizer: PreTrainedTokenizerBase) -> None:
    for case in spread(pair, tokenizer, [], 4, 400, 0):
        context = tokenizer.decode(case.context)
        question = tokenizer.decode(case.question).strip()
        assert context.count(question + tokenizer.decode(case.answer)) == 1
        at = context.index(question) / len(context)
        assert abs(at - case.depth) < 0.2
    with pytest.raises(EvaluationError, match="a prompt of 30 tokens has no room for pairs"):
        spread(pair, tokenizer, [], 1, 30, 0)


def test_pairs_fill_long_prompts_until_numbers_run_out(tokenizer: PreTrainedTokenizerBase) -> None:
    (case,) = spread(pair, tokenizer, [], 1, 10_000, 0)  # more tokens than there are numbers
    assert len(case.context) + len(case.question) == 10_000
    with pytest.raises(EvaluationError, match="takes more pairs than there are; shorten it"):
        spread(pair, tokenizer, [], 1, 10**6, 0)


@pytest.mark.parametrize("task", ["passage", "needle", "several"])
def test_texts_that_do_not_fit_are_refused(task: str, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(EvaluationError, match="too short for a prompt of"):
        spread(TASKS[task], tokenizer, ["A short text."], 1, 400, 0)
    with pytest.raises(EvaluationError, match="a prompt of 10 tokens has no room"):
        spread(TASKS[task], tokenizer, TEXTS, 1, 10, 0)


def test_standard_library_is_code() -> None:
    assert any("def dumps(" in text or "class Thread" in text for text in read_texts("stdlib"))
