"""Needles: a number hidden in prose, at every depth and length; the classic heat map."""

from typing import TYPE_CHECKING

from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.evaluation.suites.tasks import chosen
from vllm_kvselect.offline.tasks import needle, spread
from vllm_kvselect.offline.texts import read_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASK = "needle"
LENGTHS = (1024, 2048, 4096)
MAX_TOKENS = 12
"""Seven digits take seven tokens at most; what follows them does not count."""


def needles(config: EvaluationConfig, tokenizer: "PreTrainedTokenizerBase") -> list[Example]:
    """Hides one number in each prompt, at depths spread evenly over the prompts of a length.

    The shortest come first. A prompt ends where the number belongs.

    Raises:
        EvaluationError: If a task is unknown, or prose does not fit a length.
    """
    chosen(config.tasks, (TASK,))
    examples = []
    for length in config.lengths or LENGTHS:
        max_tokens = config.max_tokens or MAX_TOKENS
        given = read_texts("sotu"), config.num_examples, length - max_tokens, config.seed
        examples += [
            Example(
                name=f"{TASK}/{length}/{index}",
                task=TASK,
                length=length,
                context=tuple(each.context),
                question=tuple(each.question),
                references=(each.digits,),
                metric="exact",
                max_tokens=max_tokens,
                target=tuple(each.answer),
                depth=each.depth,
            )
            for index, each in enumerate(spread(needle, tokenizer, *given))
        ]
    return examples
