"""RULER's prompts and answers fit the length that is asked for, or are refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.evaluation.test_ruler import config
from vllm_kvselect.evaluation.suites.ruler import _Suite, ruler
from vllm_kvselect.evaluation.suites.ruler_generator import Generator, Prompt
from vllm_kvselect.evaluation.suites.ruler_package import Task
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.tiny_model import tiny_model

QUESTION = "\nQuestion: which?"
NUM_TOKENS = 5
"""Of the question."""


@pytest.fixture
def with_bos() -> PreTrainedTokenizerBase:
    """A tokenizer that begins every prompt with a token."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert tokenizer.encode("a")[0] == 0
    return tokenizer


@dataclasses.dataclass(frozen=True)
class Filling(Generator):
    """Prompts that take all the room they may have, one token for each word."""

    outputs: tuple[str, ...] = ("a",)
    share: float = 1.0

    def prompts(self, task: Task, length: int, max_tokens: int, spare: int = 0) -> list[Prompt]:
        num_words = length - max_tokens - spare - NUM_TOKENS
        return [Prompt(" a" * round(self.share * num_words) + QUESTION, self.outputs)]


def test_prompts_fit_with_the_token_they_begin_with(
    with_bos: PreTrainedTokenizerBase, known: dict[str, Task]
) -> None:
    assert len(with_bos.encode(QUESTION, add_special_tokens=False)) == NUM_TOKENS
    suite = _Suite(config(), with_bos, Filling(Path(), 1, 0))
    (example,) = suite.examples(known["cwe"], 512)
    assert example.context[0] == 0
    assert 0 not in example.context[1:] + example.question + example.target
    assert len(example.prompt) + example.max_tokens == 512


def test_every_generated_prompt_fits(with_bos: PreTrainedTokenizerBase) -> None:
    # By itself this generator leaves no room for the answer.
    for example in ruler(config(tasks=("fwe",), lengths=(2048,), max_tokens=200), with_bos):
        assert example.max_tokens == 200
        assert 1024 < len(example.prompt) + 200 <= 2048


@pytest.mark.parametrize("kept", [{"outputs": ()}, {"share": 0.4}])
def test_texts_that_are_left_empty_are_refused(
    kept: dict[str, Any], tokenizer: PreTrainedTokenizerBase, known: dict[str, Task]
) -> None:
    suite = _Suite(config(), tokenizer, Filling(Path(), 1, 0, **kept))
    with pytest.raises(EvaluationError, match="has no text for cwe that fits 512 tokens"):
        suite.examples(known["cwe"], 512)


def test_a_first_try_of_exactly_the_length_fits(tokenizer: PreTrainedTokenizerBase) -> None:
    # By itself the generator goes on for ever: it begins one step above and stays there.
    for example in ruler(config(tasks=("vt",), lengths=(4096,), seed=77), tokenizer):
        assert 3500 < len(example.prompt) + example.max_tokens <= 4096


def test_lengths_that_nothing_fits_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(EvaluationError, match="has no text for vt that fits 256 tokens"):
        ruler(config(tasks=("vt",), lengths=(256,)), tokenizer)
    with pytest.raises(EvaluationError, match="has no text for fwe that fits 256 tokens"):
        ruler(config(tasks=("fwe",), lengths=(256,), max_tokens=256), tokenizer)
