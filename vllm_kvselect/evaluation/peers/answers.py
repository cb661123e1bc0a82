"""Answers of peers to our examples, as predictions that our report puts into the same table."""

from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.predictions import Budget, Prediction, Setting
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.offline.models import load_tokenizer, model_folder
from vllm_kvselect.planning.cuts import budget_entries

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Reply = dict[str, Any]
"""What a worker says of an example: `example`, its name; `tokens`, the answer; `retained`, a share
of the entries; and, where it is measured, `nll` and `accuracy`."""


def num_entries(budget: Budget, num_tokens: int) -> int:
    """Entries per KV head that a budget allows a prompt, as the plugin counts them."""
    return min(num_tokens, budget_entries(num_tokens, EvictionConfig.parse({"budget": budget})))


def example_job(example: Example) -> dict[str, Any]:
    """What a worker is told of an example."""
    return {
        "example": example.name,
        "prompt": example.prompt,
        "question": example.question,
        "max_tokens": example.max_tokens,
        "stop": example.stop,
        "target": example.target,
    }


def end_tokens(model: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Tokens that end an answer: the tokenizer's and those of the generation settings."""
    from transformers import GenerationConfig

    ends = {tokenizer.eos_token_id}
    if (Path(model_folder(model)) / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(model_folder(model)).eos_token_id or ()
        ends |= {found} if isinstance(found, int) else set(found)
    return sorted(ends - {None})


def answer_all(
    config: EvaluationConfig,
    examples: Sequence[Example],
    done: Container[tuple[str, Setting]],
    ask: Callable[[Setting, list[Example]], Iterator[Reply]],
) -> Iterator[list[Prediction]]:
    """Has answered what is not done, with a progress bar on stderr.

    Args:
        config: Scenarios, methods and budgets.
        examples: The examples.
        done: Pairs of example and setting that are left out.
        ask: Has examples answered in a setting.

    Yields:
        One prediction at a time.
    """
    tokenizer = load_tokenizer(config.model)
    by_name = {example.name: example for example in examples}
    settings = [each for scenario in config.scenarios for each in config.settings(scenario)]
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(settings) * len(examples))
        for setting in settings:
            missing = [each for each in examples if (each.name, setting) not in done]
            progress.update(bar, description=_title(setting), advance=len(examples) - len(missing))
            for reply in ask(setting, missing):
                yield [_prediction(by_name[reply["example"]], setting, reply, tokenizer)]
                progress.advance(bar)


def _prediction(
    example: Example, setting: Setting, reply: Reply, tokenizer: "PreTrainedTokenizerBase"
) -> Prediction:
    text = str(tokenizer.decode(reply["tokens"], skip_special_tokens=True))
    for stop in example.stop:
        text = text.split(stop)[0]
    return Prediction(
        example=example.name,
        scenario=setting.scenario,
        method=setting.method,
        budget=setting.budget,
        through=setting.through,
        text=text,
        num_tokens=len(reply["tokens"]),
        retained=reply["retained"],
        nll=reply.get("nll"),
        accuracy=reply.get("accuracy"),
    )


def _title(setting: Setting) -> str:
    budget = "" if setting.budget is None else f" {setting.budget}"
    return f"{setting.scenario}, {setting.method}{budget}"
