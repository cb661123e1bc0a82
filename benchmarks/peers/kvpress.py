"""NVIDIA's kvpress: its presses mask entries in transformers.

Nothing is dropped from memory where a method's budget differs by head. In context-only the text is
compressed and then asked about, as its pipeline does; in regular the whole prompt is compressed.
Budgets count as the plugin's: a compression ratio of 1 - budget of the prompt that is compressed.
"""

from collections.abc import Container, Iterator, Sequence

from peers.answers import (
    PeerConfig,
    Reply,
    answer_all,
    end_tokens,
    example_job,
    num_entries,
)
from peers.environment import Environment, make_environment
from peers.worker import Worker
from vllm_kvselect.evaluation.examples import Example, refuse_without_questions
from vllm_kvselect.evaluation.predictions import Prediction, Setting
from vllm_kvselect.offline.models import load_tokenizer, model_folder

ENVIRONMENT = Environment(
    name="kvpress",
    packages=("kvpress==0.5.5", "transformers==5.2.0", "torch==2.13.0"),
)
ROUNDING = 1e-9
"""kvpress rounds `num_tokens * (1 - ratio)` down, also where it is a whole number but for this."""


def answer(
    config: PeerConfig, examples: Sequence[Example], done: Container[tuple[str, Setting]]
) -> Iterator[list[Prediction]]:
    """Answers every example in every setting, with a progress bar on stderr.

    Args:
        config: Model, scenarios, presses and budgets.
        examples: The questions.
        done: Pairs of example and setting that are left out.

    Yields:
        One prediction at a time.

    Raises:
        EvaluationError: If its environment cannot be made, its process fails, or the text of an
            example is not known apart from its question, which context-only needs.
    """
    if "context-only" in config.scenarios:
        refuse_without_questions(examples)
    job = {
        "model": model_folder(config.model),
        "dtype": config.dtype or "float32",
        "seed": config.seed,
        "end_tokens": end_tokens(config.model, load_tokenizer(config.model)),
    }
    with Worker(make_environment(ENVIRONMENT), "kvpress_worker.py") as worker:

        def ask(setting: Setting, missing: list[Example]) -> Iterator[Reply]:
            jobs = [example_job(each) | {"ratio": _ratio(each, setting)} for each in missing]
            asked = {"scenario": setting.scenario, "press": setting.method, "examples": jobs}
            yield from worker.ask(job | asked)

        yield from answer_all(config, examples, done, ask)


def _ratio(example: Example, setting: Setting) -> float:
    """Share of the entries that the press drops."""
    num_tokens = len(example.compressed(setting.scenario))
    if setting.budget is None:
        return 0.0
    return max(0.0, 1 - num_entries(setting.budget, num_tokens) / num_tokens - ROUNDING)
