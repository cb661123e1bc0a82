"""RULER: needles in haystacks, variable tracking, common words and questions, at given lengths.

Prompts are those of RULER's own generators, character by character; see `ruler_package.py` and, for
what is put in place around them, `ruler_runner.py`.
"""

import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track

from vllm_kvselect.evaluation.examples import Example, TokenIds
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.evaluation.suites.ruler_generator import Generator, Prompt, no_text
from vllm_kvselect.evaluation.suites.ruler_package import PACKAGE, Task, ruler_tasks
from vllm_kvselect.evaluation.suites.ruler_questions import (
    has_more_questions,
    questions,
    right_answer,
)
from vllm_kvselect.evaluation.suites.tasks import chosen
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.models import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LENGTHS = (2048, 4096)


def ruler(config: EvaluationConfig, tokenizer: "PreTrainedTokenizerBase") -> list[Example]:
    """Makes RULER's examples, `config.num_examples` texts per task and length.

    No lengths are `LENGTHS`, no tasks are all thirteen. Every example's prompt and answer fit its
    length, by the tokenizer.

    Raises:
        EvaluationError: If there is no such task, RULER cannot be had, or a length does not fit.
    """
    if config.data:
        raise EvaluationError(f"ruler takes its data from {PACKAGE.requirement}: leave out --data")
    known = ruler_tasks()
    made = list(product(chosen(config.tasks, known), config.lengths or LENGTHS))
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        suite = _Suite(config, tokenizer, Generator(Path(folder), config.num_examples, config.seed))
        # The first run of all: RULER's generators may take minutes. What they made is kept.
        return [
            example
            for name, length in track(made, "texts", console=console, transient=True)
            for example in suite.examples(known[name], length)
        ]


@dataclass(frozen=True)
class _Suite:
    """Makes the examples of one task and length at a time."""

    config: EvaluationConfig
    tokenizer: "PreTrainedTokenizerBase"
    generator: Generator

    def examples(self, task: Task, length: int) -> list[Example]:
        """Makes examples that fit the length.

        Raises:
            EvaluationError: If there are none.
        """
        max_tokens = self.config.max_tokens or task.max_tokens
        spare = 0
        while spare + max_tokens < length:
            prompts = self.generator.prompts(task, length, max_tokens, spare)
            examples = [
                example
                for index, prompt in enumerate(prompts)
                for example in self._about(task, length, index, prompt)
            ]
            longest = max(len(example.prompt) for example in examples)
            # Texts grow in steps. Where not one fits, a generator may leave the text empty.
            if longest < (length - max_tokens) / 2 or not all(prompt.outputs for prompt in prompts):
                break
            # Generators count no BOS token and not where text and question meet; one of them
            # counts no answer.
            excess = longest + max_tokens - length
            if excess <= 0:
                return examples
            spare += excess
        raise no_text(task, length)

    def _about(self, task: Task, length: int, index: int, prompt: Prompt) -> list[Example]:
        """Examples with one text."""
        several = self.config.questions > 1 and has_more_questions(task)
        context, asked = questions(task, prompt, self.config.questions)
        begin = tuple(self.tokenizer.encode(""))  # a BOS token, where the model wants one
        context_ids = begin + self._encode(context)
        return [
            Example(
                name=f"{task.name}/{length}/{index}" + (f".{number}" if several else ""),
                task=task.name,
                length=length,
                context=context_ids,
                question=self._encode(question.text),
                references=question.references,
                metric=task.metric,
                max_tokens=self.config.max_tokens or task.max_tokens,
                target=self._encode(right_answer(task, question.references)),
                depth=question.depth,
            )
            for number, question in enumerate(asked)
        ]

    def _encode(self, text: str) -> TokenIds:
        return tuple(encode(self.tokenizer, text))
