"""Questions about RULER's texts."""

from vllm_kvselect.evaluation.suites.ruler_generator import Prompt
from vllm_kvselect.evaluation.suites.ruler_package import Task
from vllm_kvselect.evaluation.suites.ruler_questions import questions, right_answer


def test_keys_with_two_values_are_not_asked_for(known: dict[str, Task]) -> None:
    needle = "One of the special magic numbers for {} is: {}."
    pairs = [("red-hat", 1), ("blue-ice cream", 2), ("red-hat", 3), ("odd-eye", 4), ("old-ox", 5)]
    words = " for odd-eye mentioned in the provided text"
    prompt = Prompt(
        "A special magic number.\n"
        + "\n".join(needle.format(*pair) for pair in pairs)
        + f"\nWhat is the special magic number{words}? The special magic number{words} is",
        ("4",),
    )
    context, asked = questions(known["niah_multikey_2"], prompt, at_most=9)
    assert context + asked[0].text == prompt.text
    assert context.endswith("is: 5.")
    assert [each.references for each in asked] == [("4",), ("2",), ("5",)]
    assert asked[1].text == asked[0].text.replace("odd-eye", "blue-ice cream")
    depths = [each.depth for each in asked]
    assert depths[1] < depths[0] < depths[2]
    assert context[round(asked[0].depth * len(context)) :].startswith("One of")
    assert len(questions(known["niah_single_1"], prompt, at_most=9)[1]) == 1


def test_right_answers_have_the_form_of_the_solved_example(known: dict[str, Task]) -> None:
    forms = {name: right_answer(known[name], ("a", "b")) for name in ("vt", "cwe", "fwe", "qa_1")}
    assert forms == {"vt": " a b", "cwe": "1. a 2. b", "fwe": " a, b", "qa_1": " a"}
