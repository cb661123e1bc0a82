"""Stories: how long answers become that the model ends itself, and how many it ends."""

from typing import TYPE_CHECKING

from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.metrics import ENDED
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.models import chat, encode
from vllm_kvselect.offline.tasks import CITIES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REQUEST = "Write a long and detailed story about a day in {city}."
MAX_TOKENS = 1000
"""Where a story is cut off, unless another number is asked for."""
TEMPERATURE = 0.7


def stories(config: EvaluationConfig, tokenizer: "PreTrainedTokenizerBase") -> list[Example]:
    """Asks for a story about each of the first cities, sampled with a seed of its own.

    A method that loses its thread may go on for longer, and its tokens per second flatter it then.
    There are no references. The model needs a chat template.

    Raises:
        EvaluationError: If there are not so many cities, or the model has no chat template.
    """
    if config.tasks or config.lengths:
        raise EvaluationError("stories have no tasks and no lengths: there are --max-tokens")
    if config.num_examples > len(CITIES):
        raise EvaluationError(f"stories are told of {len(CITIES)} cities: choose fewer examples")
    max_tokens = config.max_tokens or MAX_TOKENS
    return [
        Example(
            name=f"story/{max_tokens}/{index}",
            task="story",
            length=max_tokens,
            context=tuple(encode(tokenizer, chat(tokenizer, REQUEST.format(city=city)))),
            question=(),
            references=(),
            metric=ENDED,
            max_tokens=max_tokens,
            temperature=TEMPERATURE,
            seed=index,
        )
        for index, city in enumerate(CITIES[: config.num_examples])
    ]
