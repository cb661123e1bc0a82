import pytest
from transformers import PreTrainedTokenizerBase

from vllm_kvselect.evaluation.metrics import METRICS
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.evaluation.suites.needles import needles
from vllm_kvselect.offline.errors import EvaluationError

CONFIG = EvaluationConfig(suite="needles", lengths=(512, 1024), num_examples=5)


def test_a_number_is_hidden_at_every_depth_and_length(tokenizer: PreTrainedTokenizerBase) -> None:
    examples = needles(CONFIG, tokenizer)
    assert [each.length for each in examples] == [512] * 5 + [1024] * 5
    assert len({each.name for each in examples}) == 10
    for length in CONFIG.lengths:
        depths = [each.depth for each in examples if each.length == length]
        assert depths == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9], abs=0.1)
    for each in examples:
        assert len(each.prompt) + each.max_tokens == each.length
        digits, text = each.references[0], tokenizer.decode(each.context)
        assert text.count(digits) == 1
        assert text.index(digits) / len(text) == pytest.approx(each.depth, abs=0.15)
        answer = tokenizer.decode(each.target)
        assert METRICS[each.metric](f"{answer}. And so on", each.references, ()) == 1.0
        wrong = answer[:-1] + str((int(answer[-1]) + 1) % 10)
        assert METRICS[each.metric](wrong, each.references, ()) == 0.0


def test_the_answer_fits(tokenizer: PreTrainedTokenizerBase) -> None:
    assert all(len(each.target) <= each.max_tokens for each in needles(CONFIG, tokenizer))


def test_seed_decides(tokenizer: PreTrainedTokenizerBase) -> None:
    again = needles(CONFIG, tokenizer)
    assert needles(CONFIG, tokenizer) == again
    other = needles(CONFIG.model_copy(update={"seed": 1}), tokenizer)
    assert not {each.context for each in other} & {each.context for each in again}


def test_unknown_tasks_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(EvaluationError, match="no task 'haystack'; there are needle"):
        needles(CONFIG.model_copy(update={"tasks": ("haystack",)}), tokenizer)
