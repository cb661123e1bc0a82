import copy
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.metrics import LIKE_FULL
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.evaluation.suites.long_answers import INSTRUCTIONS, long_answers
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.texts import read_texts


def examples(tokenizer: PreTrainedTokenizerBase, **values: Any) -> list[Example]:
    values = {"suite": "long-answers", "num_examples": 2, **values}
    return long_answers(EvaluationConfig.parse({"methods": ("snapkv",)} | values), tokenizer)


def text_of(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(example.context)).partition("<|im_start|>user\n")[2]


def test_prompt_and_answer_have_the_length(tokenizer: PreTrainedTokenizerBase) -> None:
    found = examples(tokenizer)
    assert len({example.name for example in found}) == 2 * len(INSTRUCTIONS)
    for example in found:
        assert len(example.prompt) + example.max_tokens == example.length == 1500
        assert example.max_tokens == 256
        assert example.metric == LIKE_FULL
        assert not example.references

    found = examples(tokenizer, tasks=("summary",), lengths=(300, 500), max_tokens=20)
    assert [len(example.prompt) for example in found] == [280, 280, 480, 480]
    assert [example.length for example in found] == [300, 300, 500, 500]
    assert {example.max_tokens for example in found} == {20}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_instruction_follows_the_text_in_a_chat(
    name: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    source, instruction = INSTRUCTIONS[name]
    texts = read_texts(source)
    for example in examples(tokenizer, tasks=(name,)):
        text = text_of(example, tokenizer)
        assert any(each.startswith(text) for each in texts)
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{text}\n\n{instruction}"}],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert tokenizer.decode(example.prompt) == chat
        assert tokenizer.decode(example.question).startswith(f"\n\n{instruction}")


def test_seed_decides_the_texts(tokenizer: PreTrainedTokenizerBase) -> None:
    values: dict[str, Any] = {"num_examples": 4, "lengths": (400,), "max_tokens": 64}
    found = examples(tokenizer, **values)
    assert found == examples(tokenizer, **values)
    assert found != examples(tokenizer, **values, seed=1)
    assert len({text_of(example, tokenizer)[:200] for example in found}) == len(found)


def test_bos_token_is_the_templates(tokenizer: PreTrainedTokenizerBase) -> None:
    with_bos = copy.deepcopy(tokenizer)
    with_bos.chat_template = "<|endoftext|>" + str(tokenizer.chat_template)
    (bos,) = tokenizer.encode("<|endoftext|>")
    (example,) = examples(with_bos, tasks=("summary",), num_examples=1)
    assert example.prompt[0] == bos
    assert example.prompt.count(bos) == 1


def test_what_cannot_be_made_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(EvaluationError, match="256 tokens with 256 for the answer have no room"):
        examples(tokenizer, lengths=(256,))
    with pytest.raises(EvaluationError, match=r"are [0-9]+ texts of [0-9]+ tokens or more"):
        examples(tokenizer, tasks=("explanation",), lengths=(8000,), num_examples=100)
    with pytest.raises(EvaluationError, match="no task 'poem'; there are summary, continuation"):
        examples(tokenizer, tasks=("poem",))
    without = copy.deepcopy(tokenizer)
    without.chat_template = None
    with pytest.raises(EvaluationError, match="no chat template"):
        examples(without)
