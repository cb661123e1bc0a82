import pytest
from transformers import PreTrainedTokenizerBase

from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.evaluation.suites.stories import stories
from vllm_kvselect.offline.errors import EvaluationError

CONFIG = EvaluationConfig(suite="stories", through="engine", num_examples=3, max_tokens=50)


def test_every_city_has_a_story_and_a_seed(tokenizer: PreTrainedTokenizerBase) -> None:
    examples = stories(CONFIG, tokenizer)
    assert [each.seed for each in examples] == [0, 1, 2]
    assert {(each.length, each.max_tokens, each.temperature) for each in examples} == {
        (50, 50, 0.7)
    }
    chats = [tokenizer.decode(each.prompt) for each in examples]
    assert "a day in Amsterdam." in chats[0]
    assert len(set(chats)) == 3
    assert all(chat.endswith("<|im_start|>assistant\n") for chat in chats)


def test_what_stories_have_not_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    for values in ({"num_examples": 31}, {"lengths": (512,)}, {"tasks": ("story",)}):
        with pytest.raises(EvaluationError, match="stories"):
            stories(CONFIG.model_copy(update=values), tokenizer)
