from hypothesis import given
from hypothesis import strategies as st

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.planning.cuts import cuts
from vllm_kvselect.planning.turns import turns, with_context

START = (1, 7)
CHAT = EvictionConfig(method="adakv-perturb", budget=0.25, context="chat", turn_start=START)
SYSTEM, QUESTION, ANSWER = [1, 5, *[50] * 300], [*START, 60, 61], [1, 6, *[70] * 40]


def number(config: EvictionConfig, token_ids: list[int] | None) -> int | None:
    found = with_context(config, token_ids, 32)
    assert found.enabled == (found.context is not None)
    return found.context if isinstance(found.context, int) else None


@given(tokens=st.lists(st.integers(0, 2), max_size=30), start=st.lists(st.integers(0, 2)))
def test_turns_are_where_their_tokens_are(tokens: list[int], start: list[int]) -> None:
    expected = [i for i in range(len(tokens)) if start and tokens[i : i + len(start)] == start]
    assert list(turns(tokens, start)) == expected


def test_every_turn_of_a_chat_has_the_same_context() -> None:
    chat = [*SYSTEM]
    for _ in range(5):
        chat += QUESTION
        assert number(CHAT, chat) == len(SYSTEM)
        chat += ANSWER


def test_a_chat_that_begins_with_a_question_is_compressed_before_a_later_one() -> None:
    first = [*START, *[50] * 300]
    assert number(CHAT, first) is None
    second = [*first, *ANSWER, *QUESTION]
    assert number(CHAT, second) == len(first) + len(ANSWER)
    assert number(CHAT, [*second, *ANSWER, *QUESTION]) == len(first) + len(ANSWER)


def test_what_leaves_nothing_to_drop_is_no_context() -> None:
    assert number(CHAT, [1, 5, *[50] * 60, *QUESTION]) is None
    covered = CHAT.model_copy(update={"budget": 302})
    assert number(covered, [*SYSTEM, *QUESTION]) is None
    assert number(CHAT, None) is None
    assert number(CHAT.model_copy(update={"turn_start": ()}), [*SYSTEM, *QUESTION]) is None


def test_other_marks_stay_as_they_are() -> None:
    for config in (
        EvictionConfig(method="adakv-perturb"),
        EvictionConfig(method="adakv-perturb", context=500),
        EvictionConfig(method="none"),
    ):
        assert with_context(config, [*SYSTEM, *QUESTION], 32) is config
    (cut,) = cuts(400, 32, with_context(CHAT, [*SYSTEM, *QUESTION], 32))
    assert cut.position == len(SYSTEM) // 32 * 32
