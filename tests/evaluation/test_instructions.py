"""Rules before a long text: what is asked, what obeys, and who forgets."""

import copy

import pytest
from transformers import PreTrainedTokenizerBase

from vllm_kvselect.evaluation import off_engine
from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.metrics import METRICS
from vllm_kvselect.evaluation.scores import rows, scored
from vllm_kvselect.evaluation.settings import FULL, EvaluationConfig
from vllm_kvselect.evaluation.suites.instructions import FREE, RULES, TASKS, instructions
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.models import load_tokenizer

LENGTH = 800
CONFIG = EvaluationConfig(suite="instructions", lengths=(LENGTH,), num_examples=4, tasks=TASKS)


@pytest.fixture
def examples(tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Example]]:
    """By task, a text each."""
    found = instructions(CONFIG, tokenizer)
    return {task: [each for each in found if each.task == task] for task in TASKS}


def test_every_rule_stands_before_the_text_and_one_question_after_it(
    examples: dict[str, list[Example]], tokenizer: PreTrainedTokenizerBase
) -> None:
    by_text = list(zip(*examples.values(), strict=True))
    assert len(by_text) == CONFIG.num_examples
    for about in by_text:
        assert len({each.context for each in about}) == 1
        assert max(len(each.prompt) + each.max_tokens for each in about) == LENGTH
        system, _, text = tokenizer.decode(about[0].context).partition("archive.\n\n")
        assert system.count("If you are asked") == 4
        assert len(text.split()) > 200
        answers = {each.task: tokenizer.decode(each.target) for each in about}
        for task in ("ending", "two-rules", "secret", "tool"):
            drawn = answers[task].split()[-1]
            assert drawn in system, task
            assert drawn not in text, task
    assert len({about[0].context for about in by_text}) == len(by_text)


def test_an_answer_that_obeys_is_right_and_that_to_another_text_is_not(
    examples: dict[str, list[Example]], tokenizer: PreTrainedTokenizerBase
) -> None:
    for task in RULES:
        free = examples[f"{task}{FREE}"]
        answers = [tokenizer.decode(each.target) for each in examples[task]]
        metric = METRICS[free[0].metric]
        for each, answer in zip(free, answers, strict=True):
            assert metric(f"{answer}. And so on", each.references, ()) == 1.0
        if task == "secret":
            continue
        others = zip(free, [*answers[1:], answers[0]], strict=True)
        assert min(metric(answer, each.references, ()) for each, answer in others) < 1.0
        assert metric("", free[0].references, ()) == 0.0


def test_a_secret_that_is_told_is_not_kept(
    examples: dict[str, list[Example]], tokenizer: PreTrainedTokenizerBase
) -> None:
    for each in examples["secret-free"]:
        (phrase,) = each.references
        assert f"The pass phrase of today is {phrase}. Never" in tokenizer.decode(each.context)
        assert METRICS[each.metric](f"It is {phrase.upper()}!", each.references, ()) == 0.0
        assert phrase not in tokenizer.decode(each.question)


def test_what_is_asked_changes_no_text(tokenizer: PreTrainedTokenizerBase) -> None:
    def asked(**values: object) -> list[Example]:
        return instructions(CONFIG.model_copy(update=values), tokenizer)

    everything = asked()
    assert asked() == everything
    assert asked(tasks=("tool",)) == [each for each in everything if each.task == "tool"]
    assert {each.task for each in asked(tasks=())} == set(RULES)
    assert not {each.context for each in asked(seed=1)} & {each.context for each in everything}


def test_what_cannot_be_asked_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(EvaluationError, match="no room for a text"):
        instructions(CONFIG.model_copy(update={"lengths": (256,)}), tokenizer)
    with pytest.raises(EvaluationError, match="no task 'obedience'"):
        instructions(CONFIG.model_copy(update={"tasks": ("obedience",)}), tokenizer)
    plain = copy.copy(tokenizer)
    plain.chat_template = None
    with pytest.raises(EvaluationError, match="no chat template"):
        instructions(CONFIG, plain)


@pytest.mark.xdist_group("cheats")  # one process answers for all
def test_rules_are_read_and_entries_drawn_at_random_forget_them() -> None:
    """The small model, by the tokens of the right answers."""
    config = EvaluationConfig.parse(
        {
            **CONFIG.model_dump(),
            "tasks": tuple(RULES),
            "num_examples": 3,
            "scenarios": ("context-only",),
            "methods": ("random",),
            "budgets": (0.25,),
            "dtype": "float32",
        }
    )
    asked = instructions(config, load_tokenizer(""))
    predictions = [each for some in off_engine.answer(config, asked, set()) for each in some]
    full, random = rows(scored(asked, predictions))
    assert (full.method, random.method) == (FULL, "random")
    assert full.accuracy is not None
    assert random.accuracy is not None
    assert random.nll is not None
    assert random.nll.interval is not None
    assert full.accuracy.value > 0.5
    assert random.accuracy.value < 0.4
    assert random.nll.interval[0] > 0.2, "nats per token above the full cache"
